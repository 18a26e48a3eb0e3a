"""An engine in this process, for tests: feed messages, run steps, collect what comes out."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

from kvstore.blocks import block_names, namespace_root
from kvstore.geometry import KVGeometry, KVGroup
from kvstore.pool import BlockPool
from kvstore.tensors import KVMemory
from kvstore.tier.registry import TierOptions, make_connector
from services.engine.core import Engine, Progress
from services.engine.grammar import Grammars
from services.engine.intake import Limits
from services.engine.loader import LoadedModel
from services.engine.messages import AddSequence, Sampling, SequenceOutput, StepDone
from services.engine.runner import Runner
from services.engine.scheduler import Scheduler
from services.engine.tiers import Tiers

ROOT = namespace_root(salt="", model="m", tokenizer="t", dtype="float32", block_size=16, layout_version=1)


def sequence(
    seq_id: str, prompt_ids: Sequence[int], *, block_size: int = 16, named: bool = True, **kwargs: Any
) -> AddSequence:
    """AddSequence with the prompt's names and, unless given, greedy sampling of 16 tokens."""
    sampling = kwargs.pop("sampling", None) or Sampling()
    names = tuple(block_names(prompt_ids, block_size, ROOT)) if named else ()
    root = ROOT if named else b""
    return AddSequence(
        seq_id=seq_id, prompt_ids=tuple(prompt_ids), sampling=sampling, root=root, block_names=names, **kwargs
    )


class Harness:
    """One engine over memory of its own."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        num_blocks: int = 256,
        block_size: int = 16,
        max_num_batched_tokens: int = 512,
        max_num_seqs: int = 64,
        max_model_len: int = 4096,
        progress: Progress | None = None,
        tier: str = "off",
        tier_options: TierOptions | None = None,
    ) -> None:
        card = model.card
        group = KVGroup(
            num_layers=card.num_layers,
            num_kv_heads=card.num_kv_heads,
            head_dim=card.head_dim,
            block_size=block_size,
            dtype=model.dtype,
        )
        self.memory = KVMemory.create(KVGeometry(groups=(group,), num_blocks=(num_blocks,)))
        self.limits = Limits(num_blocks, block_size, max_model_len, card.vocab_size, card.eos_token_ids)
        self.grammars = Grammars(card.tokenizer_path, card.vocab_size, card.eos_token_ids)
        runner = Runner.over(model, self.memory, self.limits, self.grammars)
        self.pool = BlockPool(num_blocks)
        self.scheduler = Scheduler(
            self.pool, self.limits, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs
        )
        connector = make_connector(tier, self.memory, tier_options or TierOptions())
        self.tiers = Tiers(self.pool, card.num_layers, connector, name=tier)
        self.sent: list[Any] = []
        ticks = itertools.count()
        self.engine = Engine(
            self.scheduler,
            runner,
            send=self.sent.append,
            clock=lambda: next(ticks) * 1e-3,
            progress=progress,
            tiers=self.tiers,
        )

    def send(self, *messages: Any) -> None:
        for message in messages:
            self.engine.handle(message)

    def step(self) -> bool:
        """One step; checks the books and the accounting after it."""
        busy = self.engine.advance()
        self.scheduler.roster.check()
        tally = self.engine.tally
        parts = tally.prompt_tokens_computed + tally.decode_tokens_forwarded + tally.tokens_recomputed
        assert parts == tally.tokens_forwarded
        return busy

    def run(self, limit: int = 10_000) -> None:
        """Step until there is nothing to compute."""
        for _ in range(limit):
            if not self.step():
                patience_s = self.engine.patience_s
                if patience_s is None:
                    return
                self.grammars.settle()
                time.sleep(patience_s)
        raise AssertionError(f"not idle after {limit} steps")

    def outputs(self) -> list[SequenceOutput]:
        return [o for m in self.sent if isinstance(m, StepDone) for o in m.outputs]

    def tokens(self, seq_id: str) -> list[int]:
        """Tokens of a sequence so far; checks that positions follow one another."""
        found: list[int] = []
        first = None
        for output in self.outputs():
            if output.seq_id == seq_id and output.token_ids:
                first = output.position if first is None else first
                assert output.position == first + len(found)
                found += output.token_ids
        return found

    def end(self, seq_id: str) -> SequenceOutput:
        """The output that ended a sequence."""
        return next(o for o in self.outputs() if o.seq_id == seq_id and o.finish_reason)

    def of(self, kind: type) -> list[Any]:
        return [m for m in self.sent if isinstance(m, kind)]


def shuffle_pool(harness: Harness) -> None:
    """Leave every other block of a fresh pool free, so that no table is contiguous."""
    for i in range(harness.pool.num_blocks):
        harness.pool.acquire(f"hole-{i}", 1)
    for i in range(0, harness.pool.num_blocks, 2):
        harness.pool.release(f"hole-{i}")
