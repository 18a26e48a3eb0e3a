"""The index in Redis or Valkey: every worker's registration, load, block set and events, all with a time to live.

    pdray:{namespace}:workers                        zset    worker ids by the time they were last seen
    pdray:{namespace}:worker:{id}                    hash    epoch, signed registration, load
    pdray:{namespace}:blocks:{id}:{epoch}            set     names of 16 bytes, and one empty one (see `scripts`)
    pdray:{namespace}:events:{id}:{epoch}            stream  ids seq-0, field b: a batch (see `payload`)

Ids are percent-quoted in keys. Does not do: Redis Cluster (the keys of one worker lie in different slots), persistence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any
from urllib.parse import quote, unquote

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from kvstore.blocks import NAME_BYTES
from kvstore.errors import IndexUnavailable
from kvstore.index import scripts
from kvstore.index.base import (
    MAX_BATCHES,
    MAX_RECORD_BYTES,
    EventBatch,
    Snapshot,
    WorkerRecord,
    check_record,
    split_names,
)
from kvstore.index.payload import PayloadError, pack_batch, pack_names, unpack_batch

MAX_WORKERS = 4096
MAX_SNAPSHOT_NAMES = 1 << 18
BATCHES_PER_READ = 64  # of each stream

_Cursor = tuple[str, str]


class _WrongType(IndexUnavailable):
    """Somebody else's value lies under one of our keys."""


class RedisIndex:
    """Opens no connection before the first call; works again by itself when the store comes back."""

    def __init__(
        self, url: str, namespace: str, ttl_s: float, *, timeout_s: float = 1.0, max_batches: int = MAX_BATCHES
    ) -> None:
        """Connects to ``url``: redis://, rediss:// or unix://, with credentials inside.

        Args:
            ttl_s: life of a worker's keys after its last call.
            timeout_s: bound of each call; `read` adds its own wait.
            max_batches: how many of its last batches a stream keeps at least.
        """
        self.ignored = 0
        self._prefix = f"pdray:{namespace}:"
        self._ttl_ms = max(1, int(ttl_s * 1000))
        self._timeout_s = timeout_s
        self._max_batches = max_batches
        self._redis = self._client(url, timeout_s)
        self._waiting = self._client(url, None)  # for calls that block in the store
        self._published: dict[_Cursor, int] = {}  # number of our last batch
        self._junk: dict[str, tuple[int, str]] = {}  # stream -> (cursor, id): what lies between them is unreadable
        run = self._redis.register_script
        self._announce, self._withdraw = run(scripts.ANNOUNCE), run(scripts.WITHDRAW)
        self._publish, self._clear = run(scripts.PUBLISH), run(scripts.CLEAR)
        self._holds, self._snapshot = run(scripts.HOLDS), run(scripts.SNAPSHOT)

    async def announce(self, record: WorkerRecord, load: bytes) -> None:
        check_record(record, load)
        suffix, member = self._suffix(record.worker_id, record.epoch), quote(record.worker_id, safe="")
        args = [suffix, record.epoch, record.payload, load, self._ttl_ms]
        args += [self._prefix + "blocks:", self._prefix + "events:", member]
        await self._bounded(self._announce(self._keys(record.worker_id, record.epoch), args))

    async def withdraw(self, worker_id: str, epoch: str) -> None:
        args = [self._suffix(worker_id, epoch), quote(worker_id, safe="")]
        await self._bounded(self._withdraw(self._keys(worker_id, epoch), args))
        self._published.pop((worker_id, epoch), None)

    async def publish(self, worker_id: str, epoch: str, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        for new, gone in split_names(stored, removed):
            args = [*self._append_args(worker_id, epoch), pack_batch(new, gone), pack_names(new), pack_names(gone)]
            seq = await self._bounded(self._publish(self._pair(worker_id, epoch), args))
            if seq == scripts.LOST:
                raise IndexUnavailable(f"the index lost the blocks of {worker_id}: they must be published again")
            self._published[worker_id, epoch] = seq

    async def clear(self, worker_id: str, epoch: str) -> None:
        args = [*self._append_args(worker_id, epoch), pack_batch((), (), cleared=True)]
        self._published[worker_id, epoch] = await self._bounded(self._clear(self._pair(worker_id, epoch), args))

    async def holds(self, worker_id: str, epoch: str) -> bool:
        args = [self._published.get((worker_id, epoch), 0)]
        return bool(await self._bounded(self._holds(self._pair(worker_id, epoch), args)))

    async def workers(self) -> list[WorkerRecord]:
        members = await self._guarded(self._redis.zrange(self._prefix + "workers", 0, MAX_WORKERS - 1), [])
        if not members:
            return []
        async with self._redis.pipeline(transaction=False) as pipe:
            for member in members:
                pipe.hmget(self._prefix.encode() + b"worker:" + member, ["v", "epoch", "payload"])
            rows = await self._bounded(pipe.execute(raise_on_error=False))
        records = [self._record(member, row) for member, row in zip(members, rows, strict=True)]
        return sorted((r for r in records if r is not None), key=lambda r: r.worker_id)

    async def load(self, worker_id: str) -> bytes:
        key = self._prefix + f"worker:{quote(worker_id, safe='')}"
        load = await self._guarded(self._redis.hget(key, "load"), None)
        return bytes(load) if load and len(load) <= MAX_RECORD_BYTES else b""

    async def snapshot(self, worker_id: str, epoch: str) -> Snapshot:
        """Also raises IndexUnavailable where the set is larger than MAX_SNAPSHOT_NAMES."""
        reply = await self._bounded(self._snapshot(self._pair(worker_id, epoch), [MAX_SNAPSHOT_NAMES]))
        seq, size, foreign, packed = reply
        if size > MAX_SNAPSHOT_NAMES:
            raise IndexUnavailable(f"{worker_id} has {size} blocks, a snapshot reads {MAX_SNAPSHOT_NAMES}")
        self.ignored += foreign
        return Snapshot(seq, frozenset(packed[at : at + NAME_BYTES] for at in range(0, len(packed), NAME_BYTES)))

    async def read(self, cursors: Mapping[_Cursor, int], wait_s: float) -> list[EventBatch]:
        sources = {self._pair(*cursor)[1]: (cursor, after) for cursor, after in cursors.items()}
        starts = {key: self._start(key, after) for key, (_, after) in sources.items()}
        if not starts:
            await asyncio.sleep(wait_s)
            return []
        try:
            reply = await self._xread(starts, wait_s)
        except _WrongType:
            starts = await self._streams_only(starts)
            reply = await self._xread(starts, 0) if starts else []
            if not reply:
                await asyncio.sleep(wait_s)
        found: list[EventBatch] = []
        for key, entries in reply:
            found += self._batches(key.decode(), *sources[key.decode()], entries)
        return found

    async def ping(self) -> bool:
        try:
            return bool(await self._bounded(self._redis.ping()))
        except IndexUnavailable:
            return False

    async def close(self) -> None:
        """Close the connections; the keys stay until their time is over."""
        for client in (self._redis, self._waiting):
            await client.aclose()

    @staticmethod
    def _client(url: str, timeout_s: float | None) -> Any:
        return Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s or 1.0,
            retry=Retry(NoBackoff(), 1),
            protocol=2,
            decode_responses=False,
        )

    @staticmethod
    def _suffix(worker_id: str, epoch: str) -> str:
        return f"{quote(worker_id, safe='')}:{quote(epoch, safe='')}"

    def _pair(self, worker_id: str, epoch: str) -> list[str]:
        suffix = self._suffix(worker_id, epoch)
        return [self._prefix + "blocks:" + suffix, self._prefix + "events:" + suffix]

    def _keys(self, worker_id: str, epoch: str) -> list[str]:
        member = quote(worker_id, safe="")
        return [self._prefix + f"worker:{member}", self._prefix + "workers", *self._pair(worker_id, epoch)]

    def _append_args(self, worker_id: str, epoch: str) -> list[Any]:
        return [self._published.get((worker_id, epoch), 0), self._ttl_ms, self._max_batches]

    async def _bounded(self, call: Awaitable[Any], wait_s: float = 0.0) -> Any:
        """The call's result within the time it has; every failure of the store is IndexUnavailable."""
        try:
            async with asyncio.timeout(self._timeout_s + wait_s):
                return await call
        except ResponseError as exc:
            kind = _WrongType if str(exc).startswith("WRONGTYPE") else IndexUnavailable
            raise kind(f"redis refused: {exc}") from exc
        except (RedisError, OSError, TimeoutError) as exc:
            reason = str(exc) or f"no answer within {self._timeout_s + wait_s:g} s"
            raise IndexUnavailable(f"redis did not answer: {reason}") from exc

    async def _guarded(self, call: Awaitable[Any], otherwise: Any) -> Any:
        """As `_bounded`, but a foreign value counts as ignored."""
        try:
            return await self._bounded(call)
        except _WrongType:
            self.ignored += 1
            return otherwise

    def _record(self, member: bytes, row: Any) -> WorkerRecord | None:
        if isinstance(row, list) and row == [None, None, None]:
            return None  # its time is over
        try:
            version, epoch, payload = row
            record = WorkerRecord(unquote(member.decode(), errors="strict"), epoch.decode(), payload)
            check_record(record, b"")
        except (TypeError, ValueError, AttributeError):
            self.ignored += 1
            return None
        if version != b"1":
            self.ignored += 1
            return None
        return record

    async def _xread(self, starts: Mapping[str, str], wait_s: float) -> list[Any]:
        block_ms = max(1, int(wait_s * 1000)) if wait_s > 0 else None
        call = self._waiting.xread(dict(starts), count=BATCHES_PER_READ, block=block_ms)
        return list(await self._bounded(call, wait_s) or [])

    async def _streams_only(self, starts: Mapping[str, str]) -> dict[str, str]:
        async with self._redis.pipeline(transaction=False) as pipe:
            for key in starts:
                pipe.type(key)
            kinds = await self._bounded(pipe.execute())
        good = {key: at for (key, at), kind in zip(starts.items(), kinds, strict=True) if kind in (b"stream", b"none")}
        self.ignored += len(starts) - len(good)
        return good

    def _start(self, key: str, after: int) -> str:
        cursor, junk_id = self._junk.get(key, (-1, ""))
        return junk_id if cursor == after else f"{after}-0"

    def _batches(self, key: str, cursor: _Cursor, after: int, entries: Sequence[Any]) -> list[EventBatch]:
        """Decode a stream's entries; unreadable ones are counted, and not read again from the same cursor."""
        found: list[EventBatch] = []
        self._junk.pop(key, None)
        for entry_id, fields in entries:
            try:
                seq, minor = entry_id.decode().split("-")
                if minor != "0":
                    raise PayloadError("an id that no publisher gives")
                cleared, stored, removed = unpack_batch(fields[b"b"])
            except (PayloadError, KeyError, TypeError):
                self.ignored += 1
                self._junk[key] = (found[-1].seq if found else after, entry_id.decode())
                continue
            found.append(EventBatch(*cursor, int(seq), stored, removed, cleared))
        return found
