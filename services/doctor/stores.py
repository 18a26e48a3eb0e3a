"""Whether the metadata store answers, or can be started."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from kvstore.errors import IndexUnavailable
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
    return [asyncio.run(_ping(url))]


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


async def _ping(url: str) -> Check:
    from redis.asyncio import Redis
    from redis.exceptions import RedisError

    place = shown(url)
    try:
        client = Redis.from_url(url, socket_timeout=2, socket_connect_timeout=2)
    except ValueError as exc:
        return Check("redis", "error", f"{place} is no address of a Redis: {exc}", "--redis-url redis://host:6379/0")
    try:
        async with asyncio.timeout(ANSWER_LIMIT_S):
            await client.execute_command("PING")  # type: ignore[no-untyped-call]
    except (RedisError, OSError, TimeoutError) as exc:
        text = f"{place} does not answer: {exc or 'time is up'}; serving goes on without it"
        return Check("redis", "warning", text, "start it, mend its address or password, or --redis-url embedded")
    finally:
        await client.aclose()
    return Check("redis", "ok", f"{place} answers")


def shown(url: str) -> str:
    """The address without its password."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname or ''}{f':{parts.port}' if parts.port else ''}{parts.path}"
