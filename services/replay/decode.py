"""A simulated decode worker: sequences that share steps, over a real block pool.

    reserve ─► waiting for blocks ─► granted ─ KV arrives ─► join ─► active ─ one token each step ─► finished

Between two joins or ends a step's time grows evenly, since each sequence's context grows by a token: with a now and b
more each step, x steps take a·x + b·x²/2 ms. So time is moved from event to event by a formula instead of by steps.
A sequence joins at once, not at the next step's start: off by less than a step.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.blocks import NAME_BYTES
from kvstore.errors import OutOfBlocks
from kvstore.pool import BlockPool
from services.replay.costs import CostModel

ROOT = bytes(NAME_BYTES)


@dataclass(slots=True, eq=False)
class Answer:
    """One sequence on its way through this worker."""

    request_id: str
    num_tokens: int  # of the prompt
    output_tokens: int
    names: Sequence[bytes]
    cached_blocks: int = 0  # known with the grant


@dataclass(slots=True)
class DecodeWorker:
    """Every method that takes ``now_s`` moves time there first."""

    costs: CostModel
    block_size: int
    pool: BlockPool
    waiting: deque[Answer] = field(default_factory=deque)
    active: dict[str, Answer] = field(default_factory=dict)
    granted: int = 0  # not yet active
    now_s: float = 0.0
    steps: float = 0.0
    context_tokens: float = 0.0
    tokens_made: int = 0
    _ends: list[tuple[float, str]] = field(default_factory=list)  # step at which each is finished

    @classmethod
    def of(cls, costs: CostModel, block_size: int) -> DecodeWorker:
        return cls(costs, block_size, BlockPool(costs.cache_tokens // block_size))

    @property
    def step_ms(self) -> float:
        return self.costs.decode_ms(len(self.active), self.context_tokens)

    def blocks_of(self, answer: Answer) -> int:
        return -(-(answer.num_tokens + answer.output_tokens) // self.block_size)

    def reserve(self, answer: Answer) -> None:
        """Ask for blocks; `grants` says when they are there."""
        self.waiting.append(answer)

    def grants(self) -> list[Answer]:
        """In order of asking, those that now have blocks."""
        found = []
        while self.waiting:
            answer = self.waiting[0]
            reusable = (answer.num_tokens - 1) // self.block_size
            try:
                got = self.pool.acquire(
                    answer.request_id, self.blocks_of(answer), answer.names[:reusable], reserved=True
                )
            except OutOfBlocks:
                break
            answer.cached_blocks = got.cached_blocks
            self.granted += 1
            found.append(self.waiting.popleft())
        return found

    def join(self, answer: Answer, now_s: float) -> None:
        """The prompt's KV and token 1 are here."""
        self.advance(now_s)
        self.granted -= 1
        self.pool.activate(answer.request_id)
        for i, name in enumerate(answer.names):
            self.pool.name_block(answer.request_id, i, name, answer.names[i - 1] if i else ROOT)
        self.active[answer.request_id] = answer
        self.context_tokens += answer.num_tokens + 1
        heapq.heappush(self._ends, (self.steps + answer.output_tokens - 1, answer.request_id))

    def next_end_s(self) -> float | None:
        """When the next sequence is finished if nobody joins."""
        if not self._ends:
            return None
        x = max(0.0, self._ends[0][0] - self.steps)
        return self.now_s + (self.step_ms * x + self._growth_ms * x * x / 2) / 1000

    def finish(self, now_s: float) -> list[Answer]:
        """Those whose last token is made by now; their blocks are only a cache from now on."""
        self.advance(now_s)
        done = []
        while self._ends and self._ends[0][0] <= self.steps + 1e-6:
            answer = self.active.pop(heapq.heappop(self._ends)[1])
            self.context_tokens -= answer.num_tokens + answer.output_tokens
            self.tokens_made += answer.output_tokens - 1
            self.pool.release(answer.request_id)
            done.append(answer)
        if not self.active:
            self.context_tokens = 0.0
        return done

    def advance(self, now_s: float) -> None:
        """Make the tokens that fit until then."""
        left_ms = 1000 * (now_s - self.now_s)
        self.now_s = max(self.now_s, now_s)
        if left_ms <= 0 or not self.active:
            return
        a, b = self.step_ms, self._growth_ms
        x = left_ms / a if b <= 0 else 2 * left_ms / (a + math.sqrt(a * a + 2 * b * left_ms))
        if self._ends:
            x = min(x, self._ends[0][0] - self.steps) if self._ends[0][0] > self.steps else 0.0
        self.steps += x
        self.context_tokens += x * len(self.active)

    @property
    def _growth_ms(self) -> float:
        return len(self.active) * self.costs.decode_context_ms
