"""The index in Redis or Valkey: every worker's registration, load, block set and events, all with a time to live.

    pdray:{namespace}:workers                        zset    worker ids by the time they were last seen
    pdray:{namespace}:worker:{id}                    hash    epoch, signed registration, load
    pdray:{namespace}:blocks:{id}:{epoch}            set     names, those of lower tiers marked (see `scripts`)
    pdray:{namespace}:events:{id}:{epoch}            stream  ids seq-0, field b: a batch (see `payload`)

Ids are percent-quoted in keys; in a cluster a worker's id is in braces, so that its keys share a slot (see `keys`).
Does not do: persistence, reads from replicas.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Collection, Mapping, Sequence
from hashlib import sha1
from typing import Any

from redis.exceptions import NoScriptError, RedisClusterException, RedisError, ResponseError

from kvstore.blocks import NAME_BYTES
from kvstore.errors import IndexUnavailable
from kvstore.index import scripts
from kvstore.index.address import StoreAddress
from kvstore.index.base import (
    MAX_BATCHES,
    MAX_RECORD_BYTES,
    NUM_TIERS,
    EventBatch,
    Snapshot,
    SnapshotRefused,
    Tier,
    WorkerRecord,
    check_record,
    split_names,
)
from kvstore.index.connect import connect, disconnect
from kvstore.index.keys import Keys, member_of, worker_of
from kvstore.index.payload import PayloadError, pack_batch, pack_names, unpack_batch

MAX_WORKERS = 4096
RECORD_VERSION = b"1"  # of a worker's hash: the first, so there is none before it
MAX_SNAPSHOT_NAMES = 1 << 23
PAGED_SNAPSHOT_NAMES = 1 << 16
"""A larger set is read in pages: at once it would hold up the store for tens of milliseconds."""
PAGE_NAMES = 8192
BATCHES_PER_READ = 64  # of each stream
CLUSTER_POLL_S = 0.05
_log = logging.getLogger("pdray.index")

_Cursor = tuple[str, str]


class _WrongType(IndexUnavailable):
    """Somebody else's value lies under one of our keys."""


class _NoScript(IndexUnavailable):
    """The server does not have the script: it is new, or was started again."""


class RedisIndex:
    """Opens no connection before the first call; works again by itself when the store comes back."""

    def __init__(
        self,
        address: str | StoreAddress,
        namespace: str,
        ttl_s: float,
        *,
        timeout_s: float = 1.0,
        max_batches: int = MAX_BATCHES,
    ) -> None:
        """``address``: also a plain URL (redis://, rediss:// or unix://, with credentials inside) of one server.

        Args:
            ttl_s: life of a worker's keys after its last call.
            timeout_s: bound of each call; `read` adds its own wait.
            max_batches: how many of its last batches a stream keeps at least.
        """
        where = StoreAddress(url=address) if isinstance(address, str) else address
        self.ignored = 0
        self._told: set[str] = set()
        self._keys = Keys(namespace, where.is_cluster)
        self._ttl_ms = max(1, int(ttl_s * 1000))
        self._timeout_s = timeout_s
        self._max_batches = max_batches
        self._is_cluster = where.is_cluster
        self._redis = connect(where, timeout_s)
        # For calls that block in the store; a cluster's streams lie on many servers and are polled.
        self._waiting = self._redis if where.is_cluster else connect(where, None)
        self._published: dict[_Cursor, int] = {}  # number of our last batch
        self._junk: dict[str, tuple[int, str]] = {}  # stream -> (cursor, id): what lies between them is unreadable

    async def announce(self, record: WorkerRecord, load: bytes) -> None:
        check_record(record, load)
        suffix = self._keys.suffix(record.worker_id, record.epoch)
        args = [suffix, record.epoch, record.payload, load, self._ttl_ms, *self._keys.prefixes]
        await self._run(scripts.REGISTER, self._keys.all_of(record.worker_id, record.epoch), args)
        await self._run(scripts.ENLIST, [self._keys.workers], [member_of(record.worker_id), self._ttl_ms])

    async def withdraw(self, worker_id: str, epoch: str) -> None:
        args = [self._keys.suffix(worker_id, epoch)]
        await self._run(scripts.WITHDRAW, self._keys.all_of(worker_id, epoch), args)
        self._published.pop((worker_id, epoch), None)

    async def publish(
        self, worker_id: str, epoch: str, stored: Sequence[bytes], removed: Sequence[bytes], tier: int = Tier.DEVICE
    ) -> None:
        for new, gone in split_names(stored, removed):
            args = [*self._append_args(worker_id, epoch), pack_batch(new, gone, tier=tier)]
            args += [pack_names(new, tier), pack_names(gone, tier), NAME_BYTES + bool(tier)]
            seq = await self._run(scripts.PUBLISH, self._keys.pair(worker_id, epoch), args)
            if seq == scripts.LOST:
                raise IndexUnavailable(f"the index lost the blocks of {worker_id}: they must be published again")
            self._published[worker_id, epoch] = seq

    async def clear(self, worker_id: str, epoch: str) -> None:
        args = [*self._append_args(worker_id, epoch), pack_batch((), (), cleared=True)]
        self._published[worker_id, epoch] = await self._run(scripts.CLEAR, self._keys.pair(worker_id, epoch), args)

    async def holds(self, worker_id: str, epoch: str) -> bool:
        args = [self._published.get((worker_id, epoch), 0)]
        return bool(await self._run(scripts.HOLDS, self._keys.pair(worker_id, epoch), args))

    async def workers(self) -> list[WorkerRecord]:
        members = await self._guarded(self._redis.zrange(self._keys.workers, 0, MAX_WORKERS - 1), [])
        if not members:
            return []
        pipe = self._redis.pipeline(transaction=False)
        for member in members:
            pipe.hmget(self._keys.listed(member), ["v", "epoch", "payload"])
        rows = await self._bounded(pipe.execute(raise_on_error=False))
        records = [self._record(member, row) for member, row in zip(members, rows, strict=True)]
        return sorted((r for r in records if r is not None), key=lambda r: r.worker_id)

    async def load(self, worker_id: str) -> bytes:
        load = await self._guarded(self._redis.hget(self._keys.worker(worker_id), "load"), None)
        return bytes(load) if load and len(load) <= MAX_RECORD_BYTES else b""

    async def snapshot(self, worker_id: str, epoch: str) -> Snapshot:
        """A set of more than PAGED_SNAPSHOT_NAMES is read in pages, and may then be ahead of its number: what later
        batches say of it they may say again. Raises SnapshotRefused where it is larger than MAX_SNAPSHOT_NAMES."""
        pair = self._keys.pair(worker_id, epoch)
        seq, size, foreign, packed, marked = await self._run(scripts.SNAPSHOT, pair, [PAGED_SNAPSHOT_NAMES])
        if size > MAX_SNAPSHOT_NAMES:
            raise SnapshotRefused(f"{worker_id} has {size} blocks, a snapshot reads {MAX_SNAPSHOT_NAMES}")
        if size > PAGED_SNAPSHOT_NAMES:
            return _snapshot(seq, await self._paged(pair[0]))
        self.ignored += foreign
        width = NAME_BYTES + 1
        names = [packed[at : at + NAME_BYTES] for at in range(0, len(packed), NAME_BYTES)]
        return _snapshot(seq, names + [marked[at : at + width] for at in range(0, len(marked), width)])

    async def read(self, cursors: Mapping[_Cursor, int], wait_s: float) -> list[EventBatch]:
        sources = {self._keys.pair(*cursor)[1]: (cursor, after) for cursor, after in cursors.items()}
        starts = {key: self._start(key, after) for key, (_, after) in sources.items()}
        if not starts:
            await asyncio.sleep(wait_s)
            return []
        if self._is_cluster:
            rows = await self._polled(starts, wait_s)
            return [batch for key, entries in rows for batch in self._batches(key, *sources[key], entries)]
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
        await disconnect(self._redis)
        if self._waiting is not self._redis:
            await disconnect(self._waiting)

    def _append_args(self, worker_id: str, epoch: str) -> list[Any]:
        return [self._published.get((worker_id, epoch), 0), self._ttl_ms, self._max_batches]

    async def _run(self, script: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """A script by its digest, or whole where the server does not know it yet."""
        call = (len(keys), *keys, *args)
        try:
            return await self._bounded(self._redis.evalsha(sha1(script.encode()).hexdigest(), *call))
        except _NoScript:
            return await self._bounded(self._redis.eval(script, *call))

    async def _bounded(self, call: Awaitable[Any], wait_s: float = 0.0) -> Any:
        """The call's result within the time it has; every failure of the store is IndexUnavailable."""
        try:
            async with asyncio.timeout(self._timeout_s + wait_s):
                return await call
        except NoScriptError as exc:
            raise _NoScript(str(exc)) from exc
        except ResponseError as exc:
            kind = _WrongType if str(exc).startswith("WRONGTYPE") else IndexUnavailable
            raise kind(f"redis refused: {exc}") from exc
        except (RedisError, RedisClusterException, OSError, TimeoutError) as exc:
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
            record = WorkerRecord(worker_of(member), epoch.decode(), payload)
            check_record(record, b"")
        except (TypeError, ValueError, AttributeError):
            self.ignored += 1
            return None
        if version != RECORD_VERSION:
            self.ignored += 1
            self._tell_version(record.worker_id, version)
            return None
        return record

    def _tell_version(self, worker_id: str, version: bytes) -> None:
        """Once for each worker, so that a mixed upgrade is no riddle."""
        if worker_id not in self._told and len(self._told) < MAX_WORKERS:
            self._told.add(worker_id)
            _log.warning("worker %s is registered as version %r, this reads %r", worker_id, version, RECORD_VERSION)

    async def _paged(self, blocks: str) -> set[bytes]:
        names: set[bytes] = set()
        cursor = 0
        while True:
            cursor, page = await self._bounded(self._redis.sscan(blocks, cursor, count=PAGE_NAMES))
            names.update(name for name in page if len(name) in (NAME_BYTES, NAME_BYTES + 1))
            if int(cursor) == 0 or len(names) > MAX_SNAPSHOT_NAMES:
                return names

    async def _polled(self, starts: Mapping[str, str], wait_s: float) -> list[tuple[str, Any]]:
        """Entries of streams that lie on different servers; foreign keys count as ignored."""
        until_s = time.monotonic() + wait_s
        while True:
            pipe = self._redis.pipeline()
            for key, after in starts.items():
                pipe.xrange(key, f"({after}", "+", BATCHES_PER_READ)
            replies = await self._bounded(pipe.execute(raise_on_error=False))
            rows = [(key, reply) for key, reply in zip(starts, replies, strict=True) if reply]
            found = [(key, reply) for key, reply in rows if not isinstance(reply, Exception)]
            failed = [reply for _, reply in rows if isinstance(reply, Exception)]
            if any(not str(reply).startswith("WRONGTYPE") for reply in failed):
                raise IndexUnavailable(f"redis did not answer: {failed[0]}")
            left_s = until_s - time.monotonic()
            if found or left_s <= 0:
                self.ignored += len(failed)
                return found
            await asyncio.sleep(min(CLUSTER_POLL_S, left_s))

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
                payload = unpack_batch(fields[b"b"])
            except (PayloadError, KeyError, TypeError):
                self.ignored += 1
                self._junk[key] = (found[-1].seq if found else after, entry_id.decode())
                continue
            found.append(EventBatch(*cursor, int(seq), payload.stored, payload.removed, payload.cleared, payload.tier))
        return found


def _snapshot(seq: int, held: Collection[bytes]) -> Snapshot:
    """Of names as the set in Redis has them."""
    lower: dict[int, set[bytes]] = {}
    for name in held:
        if len(name) > NAME_BYTES and name[NAME_BYTES] < NUM_TIERS:
            lower.setdefault(name[NAME_BYTES], set()).add(name[:NAME_BYTES])
    names = frozenset(name for name in held if len(name) == NAME_BYTES)
    return Snapshot(seq, names, {tier: frozenset(marked) for tier, marked in lower.items()})
