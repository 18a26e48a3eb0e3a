"""Whether the metadata store answers, or can be started."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from kvstore.errors import IndexUnavailable
from kvstore.index.address import StoreAddress
from services.config import ServeConfig
from services.doctor.checks import Check

ANSWER_LIMIT_S = 5.0


def check_redis(config: ServeConfig) -> list[Check]:
    """Start and stop an embedded server, or ping the given one."""
    url = config.redis.url
    if url == "none":
        return [Check("redis", "note", "none: workers are found through Ray, prefix hits by the router's own bookings")]
    if url == "embedded":
        return [asyncio.run(_try_embedded())]
    return [asyncio.run(_ping(config.redis.address, config.redis.kind))]


async def _try_embedded() -> Check:
    from kvstore.index.embedded import EmbeddedValkey

    server = EmbeddedValkey()
    with tempfile.TemporaryDirectory(prefix="pdray-doctor-") as folder:
        try:
            await server.start(Path(folder))
        except IndexUnavailable as exc:
            return Check(
                "redis", "warning", f"the embedded Valkey does not start: {exc}", "--redis-url redis://… or none"
            )
        finally:
            await server.stop()
    return Check("redis", "ok", "an embedded Valkey starts and answers")


async def _ping(address: StoreAddress, kind: str) -> Check:
    from redis.exceptions import RedisClusterException, RedisError

    from kvstore.index.connect import connect, disconnect

    place = f"{kind} {address.shown}" if kind != "standalone" else address.shown
    try:
        client = connect(address, 2.0)
    except ValueError as exc:
        return Check("redis", "error", f"{place} is no address of a Redis: {exc}", "--redis-url redis://host:6379/0")
    try:
        async with asyncio.timeout(ANSWER_LIMIT_S):
            await client.ping()
    except (RedisError, RedisClusterException, OSError, TimeoutError) as exc:
        text = f"{place} does not answer: {exc or 'time is up'}; serving goes on without it"
        return Check("redis", "warning", text, "start it, mend its address or password, or --redis-url embedded")
    finally:
        await disconnect(client)
    return Check("redis", "ok", f"{place} answers")
