"""Which blocks one worker holds, as far as the router knows: what its events say, and what was routed there just now.

Both are prefix-closed (a block is there only with everything before it), so the depth of a prompt is found by
bisection. A wrong entry costs a hit, never a wrong answer.

What all workers hold together is bounded. Beyond the bound the worker that was chosen longest ago is forgotten, whole
and at once: part of a set would no longer be prefix-closed. It is read anew when there is room for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvstore.index.base import Tier
from services.router.names import NameSet, common_depth

SPECULATIVE_S = 5.0
"""How long a routed prompt counts as cached without an event that says so."""
MAX_SPECULATIVE = 1 << 18
"""Names expected at once of one worker; the oldest are forgotten first."""
LOWER_TIMES = 64
"""A lower tier may hold so many times what the worker's own pool could."""
MAX_PROMPTS = 1024
"""Prompts expected at once of one worker, likewise."""
_TIERS = frozenset(tier.value for tier in Tier)


@dataclass(slots=True)
class _Expected:
    """A prompt that was routed here: its names from ``low`` to ``high`` are not stored yet."""

    until_s: float
    names: tuple[bytes, ...]
    low: int
    high: int

    def goes_on(self, depth: int, name: bytes, now_s: float) -> bool:
        """Whether ``name`` is expected behind the first ``depth`` blocks."""
        return self.low <= depth < self.high and self.names[depth] == name and self.until_s > now_s


class Residency:
    """Blocks of one worker epoch. ``max_names`` bounds what a feed can make the router keep."""

    def __init__(self, max_names: int) -> None:
        self._max_names = max_names
        self._max_lower = LOWER_TIMES * max_names
        self._names = self.new_set()
        self._lower: dict[int, NameSet] = {}
        self._expected: deque[_Expected] = deque()  # the oldest first
        self._expected_names = 0
        self.seq = -1  # number of the last batch applied; -1 before the first snapshot
        self.chosen_s = 0.0
        self.forgotten_blocks = 0  # that it had when it was forgotten; 0 while it is kept

    def __len__(self) -> int:
        """Blocks on the device."""
        return len(self._names)

    @property
    def kept_blocks(self) -> int:
        """In all tiers."""
        return len(self._names) + sum(map(len, self._lower.values()))

    @property
    def memory_bytes(self) -> int:
        """Of what events said; what was routed is the requests' own memory, for a few seconds."""
        return self._names.memory_bytes + sum(names.memory_bytes for names in self._lower.values())

    def new_set(self, names: Collection[bytes] = ()) -> NameSet:
        """For `replace`. Of ``max_names`` about half is what the worker's pool holds; it will be full."""
        return NameSet(names, expected=self._max_names // 2)

    def reset(self, seq: int, names: Collection[bytes]) -> bool:
        """Replace everything known by a snapshot. True where that changed what was thought to be there."""
        return self.replace(seq, self.new_set(names))

    def replace(self, seq: int, fresh: NameSet, lower: Mapping[int, NameSet] | None = None) -> bool:
        """As `reset`, with sets that were built elsewhere (in a thread) and are the residency's from now on."""
        if len(fresh) > self._max_names:
            fresh = self.new_set()
        changed = not fresh.same_as(self._names)
        self._lower = {tier: names for tier, names in (lower or {}).items() if len(names) <= self._max_lower}
        self._names, self.seq, self.forgotten_blocks = fresh, seq, 0
        self._settle()
        return changed

    def apply(
        self,
        seq: int,
        stored: Sequence[bytes],
        removed: Sequence[bytes],
        cleared: bool = False,
        tier: int = Tier.DEVICE,
    ) -> bool:
        """Take one batch of events. False where a batch before it is missing (or too much came): read a snapshot."""
        if seq <= self.seq:
            return True  # told twice
        if self.seq < 0 or seq != self.seq + 1:
            return False
        if cleared:
            self._names, self._lower = self.new_set(), {}
        if tier != Tier.DEVICE:
            return self._apply_lower(seq, stored, removed, tier)
        self._names.difference_update(removed)
        if len(self._names) + len(stored) > self._max_names:
            stored = [name for name in stored if name not in self._names][: self._max_names + 1 - len(self._names)]
        if stored:
            self._names.update(stored)
            self._settle()
        self.seq = seq
        return len(self._names) <= self._max_names

    def _apply_lower(self, seq: int, stored: Sequence[bytes], removed: Sequence[bytes], tier: int) -> bool:
        names = self._lower.setdefault(tier, NameSet())
        names.difference_update(removed)
        if len(names) + len(stored) > self._max_lower:
            return False
        names.update(stored)
        self.seq = seq
        return True

    def forget(self) -> None:
        """Let go of all that events said, until there is room for it again."""
        self.forgotten_blocks, self.seq = self.kept_blocks, -1
        self._names, self._lower = self.new_set(), {}

    def expect(self, names: Sequence[bytes], now_s: float) -> None:
        """The prompt with these names was routed here; its blocks will be stored soon."""
        self.chosen_s = now_s
        self._expire(now_s)
        low = self._names.depth(names)
        if low < len(names):
            self._expected.append(_Expected(now_s + SPECULATIVE_S, tuple(names), low, len(names)))
            self._expected_names += len(names) - low

    def depth(self, names: Sequence[bytes], now_s: float, guess: int = 0) -> int:
        """How many leading blocks of a prompt are here, by bisection that begins at ``guess``."""
        depth = self._names.depth(names, 0, guess)
        more = bool(self._expected)
        while more:  # a second time only where the first found something: it may lead into another prompt's part
            more = False
            for x in self._expected:
                if depth < len(names) and x.goes_on(depth, names[depth], now_s):
                    depth = common_depth(x.names, names, depth + 1, min(x.high, len(names)))
                    more = True
        return depth

    def lower_depths(self, names: Sequence[bytes], depth: int) -> dict[str, int]:
        """Leading blocks that a load from each lower tier could complete, where that is more than the ``depth`` that
        is on the device already."""
        found = {Tier(t).name.lower(): held.depth(names, depth) for t, held in self._lower.items() if t in _TIERS}
        return {name: there for name, there in found.items() if there > depth}

    def _settle(self) -> None:
        """What has been stored is expected no more."""
        for x in self._expected:
            if x.names[x.low] in self._names:
                low = min(self._names.depth(x.names, x.low), x.high)
                self._expected_names -= low - x.low
                x.low = low
        if any(x.low == x.high for x in self._expected):
            self._expected = deque(x for x in self._expected if x.low < x.high)

    def _expire(self, now_s: float) -> None:
        while self._expected and (self._expected[0].until_s <= now_s or len(self._expected) >= MAX_PROMPTS):
            self._drop_oldest()
        while (excess := self._expected_names - MAX_SPECULATIVE) > 0:
            oldest = self._expected[0]
            if excess >= oldest.high - oldest.low:
                self._drop_oldest()
            else:
                oldest.high -= excess
                self._expected_names -= excess

    def _drop_oldest(self) -> None:
        oldest = self._expected.popleft()
        self._expected_names -= oldest.high - oldest.low


def depths(residencies: Sequence[Residency], names: Sequence[bytes], now_s: float) -> list[int]:
    """Of one prompt on each worker. Prompts end alike on many of them, behind a system prompt for one: the depth seen
    most so far is the first guess for the next."""
    found: list[int] = []
    times: dict[int, int] = {}
    guess = most = 0
    for residency in residencies:
        depth = residency.depth(names, now_s, guess)
        found.append(depth)
        times[depth] = count = times.get(depth, 0) + 1
        if count > most:
            guess, most = depth, count
    return found


def forget_beyond(residencies: Iterable[Residency], max_blocks: int) -> int:
    """Forget those chosen longest ago, the largest first among equals, until no more than ``max_blocks`` are kept.

    Returns how many blocks were forgotten.
    """
    kept = sorted((r for r in residencies if r.kept_blocks), key=lambda r: (-r.chosen_s, r.kept_blocks))
    total = before = sum(r.kept_blocks for r in kept)
    while total > max_blocks:
        victim = kept.pop()
        total -= victim.kept_blocks
        victim.forget()
    return before - total


def with_room(residencies: Sequence[Residency], max_blocks: int) -> list[Residency]:
    """Those that were forgotten and fit again, the one chosen last first."""
    room = max_blocks - sum(r.kept_blocks for r in residencies)
    back = []
    for r in sorted((r for r in residencies if r.forgotten_blocks), key=lambda r: -r.chosen_s):
        if r.forgotten_blocks <= room:
            room -= r.forgotten_blocks
            back.append(r)
    return back
