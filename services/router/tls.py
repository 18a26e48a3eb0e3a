"""The TLS files of the router's ports, tried before a port opens: gRPC says of a bad one only that it cannot bind."""

from __future__ import annotations

import ssl

from kvstore.errors import ConfigError
from services.access_config import TlsConfig


def check_tls(tls: TlsConfig) -> None:
    """Raises ConfigError naming the setting whose file cannot be used."""
    if not tls.is_on:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(tls.cert_file, tls.key_file, password="")
    except (OSError, ValueError) as exc:  # ssl.SSLError is an OSError
        files = f"{tls.cert_file}, tls.key_file {tls.key_file}"
        raise ConfigError(f"tls.cert_file {files}: not a certificate and its key: {exc}") from None
    if tls.client_ca_file:
        try:
            context.load_verify_locations(tls.client_ca_file)
        except OSError as exc:
            raise ConfigError(f"tls.client_ca_file {tls.client_ca_file}: not a certificate of a CA: {exc}") from None
