"""`pdray trace record`: what a running router is asked, as a trace in Mooncake's form, in order of arrival.

It listens at /debug/trace; texts and token ids never leave the router.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from kvstore.errors import ConfigError

WAIT_S = 1.0
"""How long a look for the next line may take."""


def record(url: str, out: Path, seconds: float, api_key: str = "", on_line: Callable[[int], None] | None = None) -> int:
    """Write what ends within so many seconds, or until KeyboardInterrupt; returns how many requests that were.

    Raises:
        ConfigError: the server cannot be reached or refuses, or the file cannot be written.
    """
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--url {url}: give it as http://host:port")
    base = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"
    request = urllib.request.Request(f"{base}/debug/trace?seconds={seconds:g}")
    if api_key:
        request.add_header("Authorization", f"Bearer {api_key}")
    lines: list[bytes] = []
    end_s = time.monotonic() + seconds
    try:
        with _OPENER.open(request, timeout=seconds + 30) as answer, out.open("wb") as file:
            while time.monotonic() < end_s + WAIT_S and (line := answer.readline()):
                lines.append(line)
                if on_line is not None:
                    on_line(len(lines))
                file.write(line)  # what is there stays, should the order not come
    except KeyboardInterrupt:
        pass
    except urllib.error.HTTPError as exc:
        raise ConfigError(f"--url {url}: {exc.code} {exc.read(2000).decode('utf-8', 'replace')}") from None
    except OSError as exc:
        raise ConfigError(f"--url {url}, --out {out}: {exc}") from None
    out.write_bytes(b"".join(in_order(lines)))
    return len(lines)


def in_order(lines: list[bytes]) -> list[bytes]:
    """By arrival; the first one at 0."""
    rows = sorted((json.loads(line) for line in lines), key=lambda row: row["timestamp"])
    start = rows[0]["timestamp"] if rows else 0
    return [json.dumps(row | {"timestamp": row["timestamp"] - start}).encode("ascii") + b"\n" for row in rows]


_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
