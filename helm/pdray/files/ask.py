"""helm test: the router is ready and answers a completion. Argument: its base URL."""

import json
import sys
import time
import urllib.request

base = sys.argv[1]
deadline = time.monotonic() + 540
while True:
    try:
        with urllib.request.urlopen(f"{base}/ready", timeout=5):
            break
    except OSError as exc:
        if time.monotonic() > deadline:
            sys.exit(f"{base}/ready: {exc}")
        time.sleep(2)
body = json.dumps({"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}).encode()
request = urllib.request.Request(f"{base}/v1/completions", body, {"Content-Type": "application/json"})
with urllib.request.urlopen(request, timeout=120) as response:
    answer = json.load(response)
if not answer["choices"] or answer["usage"]["completion_tokens"] < 1:
    sys.exit(f"no tokens in the answer: {answer}")
sys.stdout.write(json.dumps(answer) + "\n")
