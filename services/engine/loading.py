"""Loads of KV from peers and tiers: begun and ended here, around the scheduler, which stays pure.

    AddSequence ─► look-ups ─► the scheduler ─ LOADING ─► reserve, start_load ─► … ─► loaded, or short ─► RUNNING
                  (outside it,                                 └─ abort, timeout ─┬─ safe ─► RUNNING, computed
                   for a bounded time)                                            └─ not ──► quarantine, other blocks

A peer's blocks are written by the service process: `PeerLoader` tells it what is wanted, and waits for its answer.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.tier.base import Loader, Prefix
from services.engine.messages import AddSequence, Loaded, LoadEnded, LoadWanted
from services.engine.scheduler import Scheduler
from services.engine.sequence import PEER
from services.engine.sequence import Sequence as EngineSequence
from services.engine.tiers import Tiers

log = logging.getLogger("pdray.engine")

POLL_S = 0.002
"""How long the step loop may sleep while a tier looks something up or loads."""
_LOOK_AHEAD = 32  # queued sequences whose offers are looked up again before each step; the scheduler looks at no more


class PeerLoader:
    """The service process as a source; `Loader` says what the verbs mean. It bounds the time of a load itself.

    A sequence that ends while it loads needs no `fenced`: the message that ends it says whether a write may still land.
    """

    def __init__(self, send: Callable[[Any], None], block_ids: Callable[[str], Sequence[int]]) -> None:
        """Args: block_ids: all blocks of a sequence."""
        self._send = send
        self._block_ids = block_ids
        self._spans: dict[str, tuple[int, int]] = {}
        self._answers: dict[str, Loaded] = {}

    def lookup(self, seq_id: str, prefix: Prefix) -> int | None:
        return 0  # what a peer offers came with the request

    def reserve(self, seq_id: str, prefix: Prefix, first: int, count: int) -> int:
        self._spans[seq_id] = first, count
        return count

    def start_load(self, seq_id: str, block_ids: Sequence[int]) -> None:
        first, count = self._spans[seq_id]
        self._send(LoadWanted(seq_id=seq_id, block_ids=tuple(self._block_ids(seq_id)), first=first, count=count))

    def answer(self, message: Loaded) -> None:
        if message.seq_id in self._spans:
            self._answers[message.seq_id] = message

    def wait_layer(self, seq_id: str, layer: int, timeout_s: float = 0.0) -> bool:
        return seq_id in self._answers

    def errors(self, seq_id: str) -> frozenset[int]:
        first, count = self._spans[seq_id]
        loaded = max(0, self._answers[seq_id].count)
        return frozenset(self._block_ids(seq_id)[first + loaded : first + count])

    def finish(self, seq_id: str) -> bool:
        answer = self._answers.get(seq_id)
        self.abort(seq_id)
        return answer is None or not answer.quarantine

    def abort(self, seq_id: str) -> bool:
        self._spans.pop(seq_id, None)
        self._answers.pop(seq_id, None)
        return True

    def fenced(self) -> Sequence[str]:
        return ()  # Unquarantine comes as a message


@dataclass(frozen=True, slots=True)
class _Load:
    sequence: EngineSequence
    loader: Loader
    source: str
    wanted: int
    reserved: int  # of them, that will be loaded
    started_s: float
    until_s: float  # past it a tier's load is aborted


@dataclass(frozen=True, slots=True)
class _Held:
    message: AddSequence
    accepted_s: float
    until_s: float


class Loads:
    """Of one engine. ``tiers`` are the sources beside peers."""

    def __init__(
        self, scheduler: Scheduler, tiers: Tiers, send: Callable[[Any], None], clock: Callable[[], float]
    ) -> None:
        self._scheduler = scheduler
        self._roster = scheduler.roster
        self._tiers = tiers
        self._send = send
        self._clock = clock
        self._peers = PeerLoader(send, lambda seq_id: self._roster.sequences[seq_id].block_ids)
        self._loads: dict[str, _Load] = {}
        self._held: list[_Held] = []
        self._fences: Counter[str] = Counter()  # quarantines that an Unquarantine is awaited for, by sequence
        self.failed = 0

    # -- what the service process says --------------------------------------------------------------------------------

    def hold(self, message: AddSequence, accepted_s: float) -> bool:
        """Keep a sequence whose look-ups need time, until `take` gives it back; False for any other."""
        if not self._tiers.may_load or not message.block_names:
            return False
        if self._tiers.lookup(message.seq_id, _prefix(message)) is not None:
            return False
        self._held.append(_Held(message, accepted_s, self._clock() + self._tiers.lookup_s))
        return True

    def take(self) -> Iterator[tuple[AddSequence, float]]:
        """Held sequences whose look-ups are answered, or have taken too long, and when they were accepted."""
        held, self._held = self._held, []
        for item in held:
            known = self._tiers.lookup(item.message.seq_id, _prefix(item.message)) is not None
            if known or self._clock() >= item.until_s:
                yield item.message, item.accepted_s
            else:
                self._held.append(item)

    def drop(self, seq_id: str) -> bool:
        """Forget a sequence that is held; False where it is not."""
        kept = [item for item in self._held if item.message.seq_id != seq_id]
        found = len(kept) < len(self._held)
        self._held = kept
        return found

    def answered(self, message: Loaded) -> None:
        """The service process is done with a peer's load. It ends at once: the next message may be its Unquarantine."""
        if message.quarantine:
            self._fences[message.seq_id] += 1
        self._peers.answer(message)
        load = self._loads.get(message.seq_id)
        if load is not None and load.source == PEER:
            self._finish(load)

    def end(self, seq_id: str, quarantine: bool) -> bool:
        """A sequence is about to end, in whatever state: stop its load. True: its blocks have to be quarantined.

        Each ``quarantine`` that the service process asks for is ended by one Unquarantine of its own.
        """
        load = self._loads.pop(seq_id, None)
        is_safe = load is None or load.loader.abort(seq_id)
        if load is not None:
            self._tell(load, 0)
        if fences := quarantine + (not is_safe):
            self._fences[seq_id] += fences
        return fences > 0

    def unquarantine(self, seq_id: str) -> None:
        """A peer is fenced: with the last one that the sequence's blocks wait for, they are free."""
        self._fences[seq_id] -= 1
        if self._fences[seq_id] > 0:
            return
        del self._fences[seq_id]
        self._roster.pool.unquarantine(seq_id)

    # -- around a step ----------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Look up again what the tier offers to those who may be placed next; it goes before a peer with no more."""
        if not self._tiers.may_load:
            return
        for seq in self._roster.queue.first(_LOOK_AHEAD, self._roster.clock):
            if not seq.may_load or not seq.names:
                continue
            offered = self._tiers.lookup(seq.seq_id, Prefix(seq.root, seq.token_ids, seq.names)) or 0
            seq.num_saved_blocks = max(seq.num_saved_blocks, offered)
            if seq.offered_by != PEER or offered >= seq.offered_blocks:
                seq.offered_blocks, seq.offered_by = offered, self._tiers.name

    def begin(self, loading: Sequence[EngineSequence]) -> None:
        """Sequences have just become LOADING."""
        for seq in loading:
            is_peer = seq.offered_by == PEER
            loader: Loader = self._peers if is_peer else self._tiers
            first, wanted, now = seq.num_named_blocks, seq.load_blocks, self._clock()
            until_s = float("inf") if is_peer else now + self._tiers.load_s
            count = loader.reserve(seq.seq_id, Prefix(seq.root, seq.token_ids, seq.names), first, wanted)
            load = _Load(seq, loader, seq.offered_by, wanted, count, now, until_s)
            self._loads[seq.seq_id] = load
            if count:
                loader.start_load(seq.seq_id, seq.block_ids[first : first + count])
            else:
                self._end(load, loader.finish(seq.seq_id), 0)

    def advance(self) -> bool:
        """End what is loaded or late; True where a sequence has moved, or a block has become free."""
        changed = self._tiers.work()
        for seq_id in self._tiers.fenced():
            self.unquarantine(seq_id)
            changed = True
        self._tiers.forget_all_but({*self._roster.sequences, *(item.message.seq_id for item in self._held)})
        now = self._clock()
        before = len(self._loads)
        for load in list(self._loads.values()):
            seq_id = load.sequence.seq_id
            if load.loader.wait_layer(seq_id, self._tiers.last_layer):
                self._finish(load)
            elif now >= load.until_s:
                log.warning("loading %d blocks for %s took over %.1f s", load.wanted, seq_id, self._tiers.load_s)
                self._end(load, load.loader.abort(seq_id), 0)
        return changed or len(self._loads) < before

    @property
    def patience_s(self) -> float | None:
        """How long the step loop may sleep; None: only a message can move anything here."""
        waits = self._held or any(load.source != PEER for load in self._loads.values())
        told = self._tiers.patience_s
        return told if not waits or told == 0 else POLL_S

    def _finish(self, load: _Load) -> None:
        bad = load.loader.errors(load.sequence.seq_id)
        self._end(load, load.loader.finish(load.sequence.seq_id), _sound(load, bad))

    def _end(self, load: _Load, is_safe: bool, count: int) -> None:
        seq = load.sequence
        self._loads.pop(seq.seq_id)
        seq.may_load = is_safe and count == load.wanted
        if not is_safe and load.source != PEER:
            self._fences[seq.seq_id] += 1
        self._scheduler.loaded(seq.seq_id, count, quarantine=not is_safe)
        self._tell(load, count if is_safe else 0)

    def _tell(self, load: _Load, count: int) -> None:
        self.failed += count < load.wanted
        duration_ms = (self._clock() - load.started_s) * 1e3
        self._send(
            LoadEnded(
                seq_id=load.sequence.seq_id,
                source=load.source,
                wanted=load.wanted,
                count=count,
                duration_ms=duration_ms,
            )
        )


def _sound(load: _Load, bad: frozenset[int]) -> int:
    """Leading blocks of a load that hold their KV."""
    seq = load.sequence
    blocks = seq.block_ids[seq.num_named_blocks : seq.num_named_blocks + load.reserved]
    return next((i for i, block in enumerate(blocks) if block in bad), len(blocks))


def _prefix(message: AddSequence) -> Prefix:
    return Prefix(message.root, (*message.prompt_ids, *message.output_ids), message.block_names)
