"""The engine's tier, if it has one: guarded, so that a connector's failure costs hits and nothing else; and its saves.

    named blocks of a sequence ─► line of saves ─ one piece between two steps ─► save_layer (all layers) ─► saved

A piece is found in the pool by its names when its turn comes, and held until the connector has read it; what was
evicted in the meantime is not saved.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from typing import TypeVar

from kvstore.errors import KVError
from kvstore.pool import BlockPool
from kvstore.tier.base import Connector, Prefix, Save, Telling
from services.engine.messages import TierEvents
from services.engine.sequence import Work

log = logging.getLogger("pdray.engine")

PIECE_BLOCKS = 16
"""Blocks that are handed to a tier between two steps; one chunk of the tier's, where that is more."""
_MAX_SAVES = 4  # pieces that a tier may hold at once
_MAX_LINE = 4096  # pieces in line; more are not saved
_T = TypeVar("_T")


class Tiers:
    """Verbs as in `Connector`, which never raise; without a connector nothing is loaded or saved."""

    def __init__(
        self,
        pool: BlockPool,
        num_layers: int,
        connector: Connector | None = None,
        *,
        name: str = "",
        lookup_s: float = 0.1,
        load_s: float = 2.0,
    ) -> None:
        """Args: lookup_s, load_s: how long a sequence waits for a look-up, and for a load."""
        self.name = name
        self.last_layer = num_layers - 1
        self.lookup_s = lookup_s
        self.load_s = load_s
        self.saves_missed = 0  # blocks that were evicted before they could be saved
        self._pool = pool
        self._connector = connector
        self._telling = connector if isinstance(connector, Telling) else None
        self._asked: set[str] = set()
        self._line: deque[tuple[Prefix, int, int]] = deque()
        self._pinned: set[int] = set()
        self._numbers = 0
        self._wait_s: float | None = None
        self._events = TierEvents()

    @property
    def may_load(self) -> bool:
        """Whether there is a tier, and it works."""
        return self._connector is not None

    @property
    def patience_s(self) -> float | None:
        """How long the step loop may sleep; None: the tier has nothing under way."""
        if self._line and len(self._pinned) < _MAX_SAVES:
            return 0.0
        return self._wait_s

    # -- loads --------------------------------------------------------------------------------------------------------

    def lookup(self, seq_id: str, prefix: Prefix) -> int | None:
        self._asked.add(seq_id)
        nothing: int | None = 0
        return self._guard(lambda c: c.lookup(seq_id, prefix), nothing)

    def reserve(self, seq_id: str, prefix: Prefix, first: int, count: int) -> int:
        return self._guard(lambda c: min(count, c.reserve(seq_id, prefix, first, count)), 0)

    def start_load(self, seq_id: str, block_ids: Sequence[int]) -> None:
        self._guard(lambda c: c.start_load(seq_id, block_ids), None)

    def wait_layer(self, seq_id: str, layer: int, timeout_s: float = 0.0) -> bool:
        return self._guard(lambda c: c.wait_layer(seq_id, layer, timeout_s), True)

    def errors(self, seq_id: str) -> frozenset[int]:
        return self._guard(lambda c: c.errors(seq_id), frozenset())

    def finish(self, seq_id: str) -> bool:
        return self._guard(lambda c: c.finish(seq_id), False)

    def abort(self, seq_id: str) -> bool:
        return self._guard(lambda c: c.abort(seq_id), False)

    def fenced(self) -> Sequence[str]:
        nothing: Sequence[str] = ()
        return self._guard(lambda c: c.fenced(), nothing)

    def forget_all_but(self, seq_ids: Container[str]) -> None:
        """Other sequences that were looked up are over."""
        for seq_id in [s for s in self._asked if s not in seq_ids]:
            self._asked.discard(seq_id)
            self.finish(seq_id)

    # -- saves --------------------------------------------------------------------------------------------------------

    def after_step(self, work: Iterable[Work]) -> None:
        """Put what these sequences have named since the last time into the line of saves."""
        if self._connector is None:
            return
        chunk = max(1, self._connector.chunk_blocks)
        for seq in {id(item.sequence): item.sequence for item in work}.values():
            stop = seq.num_named_blocks // chunk * chunk
            first = seq.num_saved_blocks // chunk * chunk
            if not seq.root or stop <= first:
                continue
            prefix = Prefix(seq.root, seq.token_ids, seq.names)
            piece = max(chunk, PIECE_BLOCKS // chunk * chunk)
            for start in range(first, stop, piece):
                if len(self._line) >= _MAX_LINE:
                    self.saves_missed += stop - start
                    break
                self._line.append((prefix, start, min(piece, stop - start)))
            seq.num_saved_blocks = stop

    def work(self) -> bool:
        """Between two steps: let the connector do a piece of its work, and hand it one piece to save.

        True: a save that was under way before has let go of its blocks, or there is something for `take_events`.
        """
        if self._connector is None:
            return self._note_events()
        held = len(self._pinned)
        self._unpin_saved()
        changed = len(self._pinned) < held
        if self._line and len(self._pinned) < _MAX_SAVES:
            self._save(*self._line.popleft())
        nothing: float | None = None
        self._wait_s = self._guard(lambda c: c.poll(), nothing)
        return self._note_events() or changed

    def stats(self) -> dict[str, int]:
        return self._guard(lambda c: c.stats(), {})

    def take_events(self) -> TierEvents | None:
        """What the tier has come to keep, and keeps no more, since the last call; None of one that does not tell."""
        if not self._note_events():
            return None
        events, self._events = self._events, TierEvents(tier=self._events.tier)
        return events

    def close(self) -> None:
        self._guard(lambda c: c.close(), None)
        self._connector = None

    def _note_events(self) -> bool:
        """True where something waits to be told."""
        telling = self._telling
        if telling is not None and self._connector is not None:
            stored, removed = self._guard(lambda _: telling.take_events(), ((), ()))
            before = self._events
            if stored or removed:
                gone, back = {*removed}, {*stored}
                self._events = TierEvents(
                    tier=int(telling.tier),
                    stored=(*(n for n in before.stored if n not in gone), *stored),
                    removed=(*(n for n in before.removed if n not in back), *removed),
                )
        return bool(self._events.stored or self._events.removed or self._events.is_lost)

    def _save(self, prefix: Prefix, first: int, count: int) -> None:
        names = prefix.names[: first + count]
        if self._pool.lookup(names) < len(names):
            self.saves_missed += count
            return
        self._numbers += 1
        number = self._numbers
        try:
            held = self._pool.acquire(_owner(number), len(names), names)
        except KVError:
            self.saves_missed += count
            return
        self._pinned.add(number)
        if held.cached_blocks < len(names):  # these names are no chain
            self._unpin(number)
            return
        save = Save(number, prefix, first, held.block_ids[first:])
        for layer in range(self.last_layer + 1):
            self._guard(lambda c, layer=layer: c.save_layer(save, layer), None)  # type: ignore[misc]
        self._unpin_saved()

    def _unpin_saved(self) -> None:
        nothing: Sequence[int] = ()
        for number in self._guard(lambda c: c.saved(), nothing):
            self._unpin(number)

    def _unpin(self, number: int) -> None:
        if number in self._pinned:
            self._pinned.discard(number)
            self._pool.release(_owner(number))

    def _guard(self, call: Callable[[Connector], _T], otherwise: _T) -> _T:
        if self._connector is None:
            return otherwise
        try:
            return call(self._connector)
        except Exception:
            log.exception("the tier %s failed and is not used any more; what it holds costs hits only", self.name)
            self._connector = None
            self._line.clear()
            self._wait_s = None
            self._events = TierEvents(tier=self._events.tier, is_lost=True)
            for number in tuple(self._pinned):  # it may read on, but nobody asks it for what it reads
                self._unpin(number)
            return otherwise


def _owner(number: int) -> str:
    return f"save {number}"
