"""A simulated prefill worker: one line of prompts, computed in chunks, over a real block pool.

    submit ─► waiting ─┬─ blocks, nothing to load ────────► placed ─ chunk, chunk, … ─► token 1 ─► held ─► release
                       └─ blocks, KV comes from elsewhere ─► loading ─ loaded ─► placed

First come, first served; a prompt that loads lets later ones pass, one that finds no blocks lets none. It knows neither
clock nor network: whoever runs it says what time it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.blocks import NAME_BYTES
from kvstore.errors import OutOfBlocks
from kvstore.pool import BlockPool
from services.replay.costs import CostModel

ROOT = bytes(NAME_BYTES)


@dataclass(slots=True, eq=False)
class Prompt:
    """One prompt on its way through this worker."""

    request_id: str
    num_tokens: int
    names: Sequence[bytes]
    held_blocks: int = 0  # leading ones that a holder has; more than are here are loaded
    computed: int = 0  # tokens whose KV is here
    named: int = 0  # full blocks that have their names
    cached_tokens: int = 0  # of them without computing or loading
    loaded_tokens: int = 0
    started_s: float = -1.0  # its first step began


@dataclass(slots=True)
class Step:
    """What one step computes."""

    chunks: list[tuple[Prompt, int]]
    duration_ms: float


@dataclass(slots=True)
class PrefillWorker:
    """Drive it with `place`, `begin`, `end`."""

    costs: CostModel
    block_size: int
    pool: BlockPool
    waiting: deque[Prompt] = field(default_factory=deque)
    placed: deque[Prompt] = field(default_factory=deque)
    loading: dict[str, Prompt] = field(default_factory=dict)
    waiting_tokens: int = 0
    is_busy: bool = False
    steps: int = 0
    tokens_computed: int = 0

    @classmethod
    def of(cls, costs: CostModel, block_size: int) -> PrefillWorker:
        return cls(costs, block_size, BlockPool(costs.cache_tokens // block_size))

    @property
    def missing_tokens(self) -> int:
        """Prompt tokens to be computed, as a worker tells them: hits of those that wait are not foreseen."""
        started = sum(p.num_tokens - p.computed for p in self.placed)
        return self.waiting_tokens + started + sum(p.num_tokens - p.computed for p in self.loading.values())

    def submit(self, prompt: Prompt) -> None:
        self.waiting.append(prompt)
        self.waiting_tokens += prompt.num_tokens

    def place(self, budget: int) -> list[Prompt]:
        """Give blocks to prompts in order, as far as a step of ``budget`` tokens has room; those placed or loading."""
        left = budget - sum(p.num_tokens - p.computed for p in self.placed)
        found = []
        while self.waiting and left > 0:
            prompt = self.waiting[0]
            reusable = (prompt.num_tokens - 1) // self.block_size
            try:
                got = self.pool.acquire(
                    prompt.request_id, -(-prompt.num_tokens // self.block_size), prompt.names[:reusable]
                )
            except OutOfBlocks:
                break
            self.waiting.popleft()
            self.waiting_tokens -= prompt.num_tokens
            prompt.named = got.cached_blocks
            prompt.computed = prompt.cached_tokens = got.cached_blocks * self.block_size
            if prompt.held_blocks > got.cached_blocks:
                prompt.loaded_tokens = (prompt.held_blocks - got.cached_blocks) * self.block_size
                self.loading[prompt.request_id] = prompt
            else:
                self.placed.append(prompt)
                left -= prompt.num_tokens - prompt.computed
            found.append(prompt)
        return found

    def loaded(self, request_id: str) -> None:
        """KV from elsewhere has arrived."""
        prompt = self.loading.pop(request_id)
        prompt.computed += prompt.loaded_tokens
        self._name(prompt)
        self.placed.append(prompt)

    def begin(self, now_s: float) -> Step | None:
        """The next step, or None where nothing can be computed."""
        left, chunks_ms, chunks = self.costs.chunk_tokens, 0.0, []
        for prompt in self.placed:
            tokens = min(left, prompt.num_tokens - prompt.computed)
            chunks.append((prompt, tokens))
            chunks_ms += self.costs.chunk_ms(prompt.computed, tokens)
            if prompt.started_s < 0:
                prompt.started_s = now_s
            left -= tokens
            if left <= 0:
                break
        if not chunks:
            return None
        self.is_busy = True
        return Step(chunks, self.costs.step_ms(chunks_ms))

    def end(self, step: Step) -> list[Prompt]:
        """The step is over; returns the prompts that have their first token. They hold their blocks until `release`."""
        self.is_busy = False
        self.steps += 1
        for prompt, tokens in step.chunks:
            prompt.computed += tokens
            self.tokens_computed += tokens
            self._name(prompt)
        done = [prompt for prompt, _ in step.chunks if prompt.computed >= prompt.num_tokens]
        for _ in done:
            self.placed.popleft()
        return done

    def release(self, request_id: str) -> None:
        """Its KV was handed over: the blocks stay as a cache only."""
        self.pool.release(request_id)

    def _name(self, prompt: Prompt) -> None:
        full = min(prompt.computed // self.block_size, len(prompt.names))
        for i in range(prompt.named, full):
            self.pool.name_block(prompt.request_id, i, prompt.names[i], prompt.names[i - 1] if i else ROOT)
        prompt.named = max(prompt.named, full)
