"""helm test: the router is ready and answers a completion.

    ask.py BASE_URL [CERTIFICATE [CLIENT_FOLDER]]

CERTIFICATE is the server's own, the only one that is believed; CLIENT_FOLDER has tls.crt and tls.key. The API key is
PDRAY_API_KEY; without one, a router that asks for keys is not asked for more than that it does.
"""

import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request

base, *files = sys.argv[1:]
context = None
if files:
    context = ssl.create_default_context(cafile=files[0])
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.check_hostname = False
    if files[1:]:
        context.load_cert_chain(f"{files[1]}/tls.crt", f"{files[1]}/tls.key")
deadline = time.monotonic() + 540
while True:
    try:
        with urllib.request.urlopen(f"{base}/ready", timeout=5, context=context):
            break
    except OSError as exc:
        if time.monotonic() > deadline:
            sys.exit(f"{base}/ready: {exc}")
        time.sleep(2)
key = os.environ.get("PDRAY_API_KEY", "")
headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
body = json.dumps({"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}).encode()
request = urllib.request.Request(f"{base}/v1/completions", body, headers)
try:
    with urllib.request.urlopen(request, timeout=120, context=context) as response:
        answer = json.load(response)
except urllib.error.HTTPError as exc:
    if exc.code == 401 and not key:
        sys.stdout.write("ready; it asks for an API key, and access.testKey gives none\n")
        sys.exit(0)
    sys.exit(f"{base}/v1/completions: HTTP {exc.code}: {exc.read()[:500].decode(errors='replace')}")
if not answer["choices"] or answer["usage"]["completion_tokens"] < 1:
    sys.exit(f"no tokens in the answer: {answer}")
sys.stdout.write(json.dumps(answer) + "\n")
