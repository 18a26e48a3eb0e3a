"""Keeps one Ray Serve configuration deployed: sends it when it has changed, and again to a head that has lost it.

    keep_deployed.py FILE DASHBOARD_URL

FILE is JSON and may be replaced at any time, as a mounted ConfigMap is. The token is RAY_AUTH_TOKEN. Never ends.
"""

import json
import os
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

PERIOD_S = 5.0
LIMIT_S = 60.0


def call(url: str, body: bytes | None = None) -> bytes:
    """The answer of one call to the dashboard; PUT with a body, else GET. Raises OSError."""
    headers = {"Content-Type": "application/json"}
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        headers["Authorization"] = f"Bearer {token}"
    request = urllib.request.Request(url, body, headers, method="GET" if body is None else "PUT")
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as response:
            answer: bytes = response.read()
            return answer
    except urllib.error.HTTPError as exc:
        raise OSError(f"HTTP {exc.code}: {exc.read()[:2000].decode(errors='replace')}") from None


def one_round(file: Path, url: str, sent: bytes | None) -> bytes:
    """What has been sent now. ``sent`` is what was sent before, None after a start. Raises OSError, ValueError."""
    wanted = file.read_bytes()
    names = {app["name"] for app in json.loads(wanted)["applications"]}
    known = set(json.loads(call(url)).get("applications", {}))
    if wanted == sent and names <= known:
        return wanted
    call(url, wanted)
    sys.stdout.write(f"sent {len(wanted)} bytes: applications {', '.join(sorted(names))}\n")
    return wanted


def main() -> None:
    file, url = Path(sys.argv[1]), f"{sys.argv[2].rstrip('/')}/api/serve/applications/"
    sent: bytes | None = None
    last = ""
    while True:
        try:
            sent, last = one_round(file, url, sent), ""
        except (OSError, ValueError, KeyError) as exc:
            if str(exc) != last:
                last = str(exc)
                sys.stdout.write(f"not deployed: {last}\n")
        time.sleep(PERIOD_S)


if __name__ == "__main__":
    main()
