"""Readiness probe of a router that asks for client certificates, which kubelet has none of.

    ask_ready.py URL CERTIFICATE CLIENT_FOLDER

CERTIFICATE is the server's own, the only one that is believed; CLIENT_FOLDER has tls.crt and tls.key. Ends with 0 where
the answer is 200.
"""

import ssl
import sys
import urllib.request

url, certificate, client = sys.argv[1:]
context = ssl.create_default_context(cafile=certificate)
context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
context.check_hostname = False
context.load_cert_chain(f"{client}/tls.crt", f"{client}/tls.key")
try:
    with urllib.request.urlopen(url, timeout=4, context=context):
        pass
except OSError as exc:
    sys.exit(f"{url}: {exc}")
