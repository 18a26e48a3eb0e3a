"""The ports an application takes, checked before anything is started, since a late clash shows as a hang."""

from __future__ import annotations

import dataclasses
import socket
from dataclasses import dataclass

from services.config import ServeConfig
from services.start.system import StartError


@dataclass(frozen=True, slots=True)
class Port:
    """One listening port of `pdray serve`."""

    purpose: str
    host: str
    number: int
    option: str  # the command-line option that moves it


def port_map(config: ServeConfig) -> tuple[Port, ...]:
    """Every port with a fixed number, in the order in which they are shown."""
    router = config.router
    return (
        Port("HTTP: OpenAI API and chat page", router.host, router.port, "--port"),
        Port("gRPC", router.host, router.grpc_port, "--grpc-port"),
        Port("HTTP through Ray Serve", router.host, router.serve_port, "--set router.serve_port=N"),
        Port("gRPC through Ray Serve", "::", router.serve_grpc_port, "--set router.serve_grpc_port=N"),
    )


def _listener(host: str, number: int) -> socket.socket:
    """A socket bound as a server binds it: a closed connection in TIME_WAIT is no clash, a listener is."""
    family, kind, proto, _, address = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(address)
        sock.listen(1)
    except OSError:
        sock.close()
        raise
    return sock


def why_not(host: str, number: int) -> str:
    """Why nobody can listen there now; empty where one can."""
    if host == "::" and not socket.has_dualstack_ipv6():
        host = "0.0.0.0"
    try:
        _listener(host, number).close()
    except OSError as exc:
        return exc.strerror or str(exc)
    return ""


def free_port(host: str = "127.0.0.1") -> int:
    """A port nobody listens on now; whoever binds it must still expect a clash."""
    with _listener(host, 0) as sock:
        return int(sock.getsockname()[1])


def check_ports(config: ServeConfig) -> None:
    """Raise StartError naming each port that is taken and the option that moves it, or two purposes with one port."""
    seen: dict[int, Port] = {}
    problems: list[str] = []
    for port in port_map(config):
        if port.number == 0:
            continue
        if (other := seen.get(port.number)) is not None:
            problems.append(f"port {port.number} is given to both {other.option} and {port.option}: change one")
        elif reason := why_not(port.host, port.number):
            problems.append(f"port {port.number} ({port.purpose}): {reason}; choose another with {port.option}")
        seen[port.number] = port
    if problems:
        raise StartError("\n".join(problems))


def with_serve_ports(config: ServeConfig) -> ServeConfig:
    """The same configuration with free ports for Serve's proxies where it says 0: Serve cannot choose and tell."""
    router = config.router
    serve_port = router.serve_port or free_port(router.host)
    serve_grpc_port = router.serve_grpc_port or free_port(router.host)
    return dataclasses.replace(
        config, router=dataclasses.replace(router, serve_port=serve_port, serve_grpc_port=serve_grpc_port)
    )
