"""Static pages that load nothing from anywhere: one HTML file each, its script and style allowed by their hashes."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from starlette.responses import Response

STATIC = Path(__file__).parent / "static"


class Page:
    """An HTML file of ``static/``, read once."""

    def __init__(self, name: str) -> None:
        self._html = (STATIC / name).read_text(encoding="utf-8")
        self._policy = content_security_policy(self._html)

    def response(self) -> Response:
        headers = {
            "content-security-policy": self._policy,
            "referrer-policy": "no-referrer",
            "cache-control": "no-cache",
        }
        return Response(self._html, media_type="text/html", headers=headers)


def content_security_policy(html: str) -> str:
    """Only this page's own script and style run, only this host is called, and no other page may frame it."""
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {_hashes('script', html)}",
            f"style-src {_hashes('style', html)}",
            "connect-src 'self'",
            "img-src 'self' data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )


def _hashes(tag: str, html: str) -> str:
    bodies = re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", html, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(body.encode()).digest()).decode() for body in bodies]
    return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
