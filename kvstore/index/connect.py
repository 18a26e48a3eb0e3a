"""A client for each kind of store that an address can name."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit, urlunsplit

from redis.asyncio import Redis, RedisCluster, Sentinel
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from kvstore.index.address import StoreAddress

PORT, SENTINEL_PORT = 6379, 26379
CONNECT_S = 1.0


def connect(address: StoreAddress, timeout_s: float | None) -> Any:
    """A client that opens no connection before its first call. ``timeout_s``: of an answer; None: it may block.

    Raises ValueError for an address that cannot be read.
    """
    options, hosts = _options(address)
    options |= {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s or CONNECT_S,
        "retry": Retry(NoBackoff(), 1),
        "protocol": 2,
        "decode_responses": False,
    }
    if address.topology == "sentinel":
        return _by_sentinels(address, hosts, options, timeout_s)
    if address.is_cluster:
        options.pop("db", None)  # a cluster has only one
        nodes = [ClusterNode(host, port) for host, port in hosts]
        return RedisCluster(startup_nodes=nodes, **options)
    if hosts:
        options["host"], options["port"] = hosts[0]
    return Redis(**options)


async def disconnect(client: Any) -> None:
    """Close the client's connections, and those to its sentinels."""
    await client.aclose()
    manager = getattr(getattr(client, "connection_pool", None), "sentinel_manager", None)
    for sentinel in manager.sentinels if manager is not None else ():
        await sentinel.aclose()


def _by_sentinels(
    address: StoreAddress, hosts: list[tuple[str, int]], options: dict[str, Any], timeout_s: float | None
) -> Any:
    own = {name: value for name, value in options.items() if name.startswith("ssl")}
    own |= {"username": address.sentinel_username or None, "password": address.sentinel_password or None}
    own |= {"socket_timeout": timeout_s or CONNECT_S, "socket_connect_timeout": timeout_s or CONNECT_S}
    own["retry"] = Retry(NoBackoff(), 0)
    make_sentinel: Any = Sentinel
    return make_sentinel(hosts, sentinel_kwargs=own, **options).master_for(address.service)


def _options(address: StoreAddress) -> tuple[dict[str, Any], list[tuple[str, int]]]:
    """What every kind of client is given, and the hosts; none for a unix socket."""
    parts = urlsplit(address.url)
    user, at, places = parts.netloc.rpartition("@")
    first, *others = places.split(",")
    options: dict[str, Any] = dict(parse_url(urlunsplit(parts._replace(netloc=f"{user}{at}{first}"))))
    options.pop("connection_class", None)
    if address.username:
        options["username"] = address.username
    if address.password:
        options["password"] = address.password
    if parts.scheme == "rediss":
        options["ssl"] = True
        files = {"ssl_ca_certs": address.ca_file, "ssl_certfile": address.cert_file, "ssl_keyfile": address.key_file}
        options |= {name: value for name, value in files.items() if value}
    if parts.scheme == "unix":
        if address.topology != "standalone":
            raise ValueError(f"a {address.topology} is reached by hosts, not by unix://")
        return options | {"unix_socket_path": options.pop("path")}, []
    usual = SENTINEL_PORT if address.topology == "sentinel" else PORT
    if others and address.topology == "standalone":
        raise ValueError(f"{address.shown} names {1 + len(others)} hosts, a standalone server has one")
    hosts = [(options.pop("host", "localhost"), options.pop("port", usual))]
    for place in others:
        split = urlsplit(f"//{place}")
        if not split.hostname:
            raise ValueError(f"{address.shown} has an empty host")
        hosts.append((split.hostname, split.port or usual))
    return options, hosts
