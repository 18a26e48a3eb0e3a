"""KV that left the block pool and comes back from a tier: equal tokens, right counts, and no harm when a tier fails."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence

import pytest

from kvstore.blocks import block_names, namespace_root
from kvstore.tier.base import Prefix, Save
from kvstore.tier.registry import TierOptions
from services.engine.loader import LoadedModel
from services.engine.messages import AbortSequence, AddSequence, LoadEnded, LoadWanted, Sampling
from services.engine.sequence import Phase
from tests.engine_harness import Harness, sequence

SIZE = 16
CHUNK_TOKENS = 64
LENGTH = 500
GREEDY = Sampling(max_tokens=8, ignore_eos=True)
OPTIONS = TierOptions(host_bytes=64 << 20, chunk_tokens=CHUNK_TOKENS, model="tiny")
EXAMPLE = "docs.examples.dict_connector:DictConnector"
TIERS = ["host", EXAMPLE, "lmcache"]
Make = Callable[..., Harness]
FAILING = f"{__name__}:FailingConnector"


def prompt(seed: int, length: int = LENGTH) -> list[int]:
    return [(seed * 131 + 7 * i * i + i) % 500 + 3 for i in range(length)]


@pytest.fixture(scope="module")
def cold(tiny: LoadedModel) -> list[int]:
    """What the engine answers without a tier."""
    return answers(Harness(tiny, num_blocks=40), "cold", prompt(1))


@pytest.fixture(params=TIERS)
def tier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "lmcache":
        pytest.importorskip("lmcache", reason="LMCache is not installed; make setup does it")
        monkeypatch.setenv("LMCACHE_TRACK_USAGE", "false")
    return str(request.param)


@pytest.fixture
def made() -> Iterator[Make]:
    """Engines with a tier, whose threads end with the test."""
    harnesses: list[Harness] = []

    def make(model: LoadedModel, num_blocks: int, tier: str, options: TierOptions = OPTIONS) -> Harness:
        harnesses.append(Harness(model, num_blocks=num_blocks, tier=tier, tier_options=options))
        return harnesses[-1]

    yield make
    for harness in harnesses:
        harness.tiers.close()


def answers(harness: Harness, seq_id: str, ids: Sequence[int], sampling: Sampling = GREEDY) -> list[int]:
    harness.send(sequence(seq_id, ids, sampling=sampling))
    harness.run()
    return harness.tokens(seq_id)


def evict(harness: Harness, seed: int = 2) -> None:
    """Another prompt takes all blocks."""
    answers(harness, f"evict-{seed}", prompt(seed))
    assert harness.pool.lookup(sequence("?", prompt(1)).block_names) < 8


def test_a_prompt_that_was_stored_and_evicted_comes_back_with_equal_tokens(
    tiny: LoadedModel, made: Make, tier: str, cold: list[int]
) -> None:
    harness = made(tiny, 40, tier)
    assert answers(harness, "first", prompt(1)) == cold
    assert harness.end("first").cached_tokens == 0
    evict(harness)
    here = harness.pool.lookup(sequence("?", prompt(1)).block_names) * SIZE
    assert answers(harness, "again", prompt(1)) == cold
    kept = 448 if tier == "lmcache" else 496
    assert harness.end("again").cached_tokens == kept
    assert dict(harness.engine.stats().cached_by_source) == {"device": here, tier: kept - here}
    (ended,) = [m for m in harness.of(LoadEnded) if m.seq_id == "again"]
    assert (ended.source, ended.count * SIZE) == (tier, kept - here)
    counts = harness.pool.counts()
    assert (counts.used, counts.reserved, counts.quarantined) == (0, 0, 0)


def test_outputs_are_kept_for_the_next_turn(tiny: LoadedModel, made: Make, tier: str) -> None:
    harness = made(tiny, 40, tier)
    long = dataclasses.replace(GREEDY, max_tokens=90)
    first = answers(harness, "first", prompt(1, 100), long)
    evict(harness)
    turn = [*prompt(1, 100), *first, *prompt(3, 20)]
    again = answers(harness, "again", turn)
    assert again == answers(Harness(tiny, num_blocks=40), "cold", turn)
    assert harness.end("again").cached_tokens >= 128  # 189 tokens were forwarded: 11 blocks, 2 chunks of 64


def test_salts_share_nothing(tiny: LoadedModel, made: Make, tier: str, cold: list[int]) -> None:
    harness = made(tiny, 40, tier)
    answers(harness, "first", prompt(1))
    evict(harness)
    root = namespace_root(salt="b", model="m", tokenizer="t", dtype="float32", block_size=SIZE, layout_version=1)
    names = tuple(block_names(prompt(1), SIZE, root))
    other: AddSequence = dataclasses.replace(
        sequence("other", prompt(1), sampling=GREEDY), root=root, block_names=names
    )
    harness.send(other)
    harness.run()
    assert harness.tokens("other") == cold
    assert harness.end("other").cached_tokens == 0


def test_equal_prompts_at_once_load_once(tiny: LoadedModel, made: Make, tier: str, cold: list[int]) -> None:
    harness = made(tiny, 80, tier)
    answers(harness, "first", prompt(1))
    for seed in (2, 3, 4):
        answers(harness, f"evict-{seed}", prompt(seed))
    harness.send(*[sequence(f"again-{i}", prompt(1), sampling=GREEDY) for i in range(3)])
    harness.run()
    for i in range(3):
        assert harness.tokens(f"again-{i}") == cold
        assert harness.end(f"again-{i}").cached_tokens >= 448
    assert len([m for m in harness.of(LoadEnded) if m.seq_id.startswith("again")]) == 1


def test_a_preempted_sequence_is_loaded_instead_of_computed_again(
    tiny: LoadedModel, made: Make, cold: list[int]
) -> None:
    harness = made(tiny, 40, "host")
    harness.send(sequence("a", prompt(1), sampling=GREEDY))
    for _ in range(6):
        harness.step()
    seq = harness.scheduler.roster.sequences["a"]
    while harness.engine.patience_s == 0:
        harness.tiers.work()
    harness.scheduler.roster.preempt(seq)
    harness.pool.acquire("all", 40)
    harness.pool.release("all")
    harness.run()
    assert harness.tokens("a") == cold
    assert harness.engine.tally.tokens_recomputed < 2 * SIZE
    assert harness.end("a").cached_tokens == 0


def test_an_abort_while_a_tier_loads_leaves_nothing(tiny: LoadedModel, made: Make, tier: str) -> None:
    harness = made(tiny, 40, tier)
    answers(harness, "first", prompt(1))
    evict(harness)
    harness.send(sequence("again", prompt(1), sampling=GREEDY))
    for _ in range(1000):
        harness.step()
        seq = harness.scheduler.roster.sequences.get("again")
        if seq is not None and seq.phase is Phase.LOADING:
            break
    harness.send(AbortSequence(seq_id="again"))
    harness.run()
    counts = harness.pool.counts()
    assert (counts.used, counts.reserved, counts.quarantined) == (0, 0, 0)


class FailingConnector:
    """The example, but for what the test makes of it."""

    fails = ""

    def __new__(cls, memory: object, options: object) -> object:
        from docs.examples.dict_connector import DictConnector

        class Failing(DictConnector):
            def errors(self, seq_id: str) -> frozenset[int]:
                blocks = self._loads[seq_id][0]
                return frozenset(blocks[2:3] if cls.fails == "block" else super().errors(seq_id))

            def reserve(self, seq_id: str, prefix: Prefix, first: int, count: int) -> int:
                return 0 if cls.fails == "reserve" else super().reserve(seq_id, prefix, first, count)

            def wait_layer(self, seq_id: str, layer: int, timeout_s: float = 0.0) -> bool:
                if cls.fails == "raise":
                    raise RuntimeError("on purpose")
                return cls.fails != "time" and super().wait_layer(seq_id, layer, timeout_s)

            def save_layer(self, save: Save, layer: int) -> None:
                if cls.fails == "save":
                    raise RuntimeError("on purpose")
                super().save_layer(save, layer)

            def lookup(self, seq_id: str, prefix: Prefix) -> int | None:
                return None if cls.fails == "lookup" else super().lookup(seq_id, prefix)

        return Failing(memory, options)  # type: ignore[arg-type]

    lookup = reserve = start_load = wait_layer = errors = finish = abort = fenced = None
    save_layer = saved = poll = stats = close = None
    chunk_blocks = 1


@pytest.mark.parametrize("fails", ["block", "reserve", "raise", "time", "lookup"])
def test_whatever_fails_in_a_tier_the_answer_is_right(
    tiny: LoadedModel, made: Make, cold: list[int], fails: str
) -> None:
    harness = made(tiny, 80, FAILING)
    harness.tiers.load_s = harness.tiers.lookup_s = 0.3  # the harness's clock moves by a millisecond at each look
    answers(harness, "first", prompt(1))
    for seed in (2, 3, 4):
        answers(harness, f"evict-{seed}", prompt(seed))
    FailingConnector.fails = fails
    try:
        assert answers(harness, "again", prompt(1)) == cold
        assert answers(harness, "last", prompt(1)) == cold
    finally:
        FailingConnector.fails = ""
    here = harness.end("again").cached_tokens
    assert here <= (2 + 4) * SIZE
    stats = harness.engine.stats()
    assert stats.loads_failed == (0 if fails == "lookup" else 1)
    assert stats.blocks_quarantined == (32 if fails == "raise" else 0)  # nobody can say whether it still writes
    assert stats.blocks_used == stats.blocks_reserved == 0


def test_a_tier_that_fails_while_it_saves_holds_no_block(
    tiny: LoadedModel, made: Make, cold: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = made(tiny, 80, FAILING)
    monkeypatch.setattr(FailingConnector, "fails", "save")
    assert answers(harness, "first", prompt(1)) == cold
    counts = harness.pool.counts()
    assert (counts.used, counts.reserved, counts.quarantined) == (0, 0, 0)


def test_two_equal_prompts_at_once_one_block_of_which_is_lost(
    tiny: LoadedModel, made: Make, cold: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = made(tiny, 80, FAILING)
    answers(harness, "first", prompt(1))
    for seed in (2, 3, 4):
        answers(harness, f"evict-{seed}", prompt(seed))
    here = harness.pool.lookup(sequence("?", prompt(1)).block_names)
    monkeypatch.setattr(FailingConnector, "fails", "block")
    harness.send(*[sequence(f"again-{i}", prompt(1), sampling=GREEDY) for i in range(2)])
    harness.run()
    assert harness.tokens("again-0") == harness.tokens("again-1") == cold
    assert harness.end("again-0").cached_tokens == (here + 2) * SIZE
    assert harness.end("again-1").cached_tokens == 496
    assert harness.engine.stats().loads_failed == 1


@pytest.mark.parametrize("offered", [0, 4, 31])
def test_what_the_tier_has_is_not_asked_of_a_peer(tiny: LoadedModel, made: Make, cold: list[int], offered: int) -> None:
    harness = made(tiny, 40, "host")
    answers(harness, "first", prompt(1))
    evict(harness)
    harness.send(sequence("again", prompt(1), sampling=GREEDY, offered_blocks=offered))
    harness.run()
    assert harness.tokens("again") == cold
    assert [ended.source for ended in harness.of(LoadEnded)] == ["host"]
    assert harness.of(LoadWanted) == []


def test_a_peer_that_has_more_than_the_tier_is_asked(tiny: LoadedModel, made: Make) -> None:
    harness = made(tiny, 40, "host")
    answers(harness, "first", prompt(1, 100))
    evict(harness)
    harness.send(sequence("again", prompt(1), sampling=GREEDY, offered_blocks=20))
    harness.run()
    (wanted,) = harness.of(LoadWanted)
    assert wanted.first + wanted.count == 20
    harness.send(AbortSequence(seq_id="again"))
    harness.run()


@pytest.mark.parametrize("seed", range(3))
def test_random_loads_over_a_small_pool_and_a_small_tier_answer_as_without_a_tier(
    tiny: LoadedModel, made: Make, tier: str, seed: int
) -> None:
    source = random.Random(seed)
    trunk = prompt(9, 160)
    prompts = [trunk[: 32 * i] + prompt(20 + i, source.choice([40, 65, 96])) for i in range(5)]
    expected = [answers(Harness(tiny, num_blocks=40), "cold", ids) for ids in prompts]
    options = dataclasses.replace(OPTIONS, host_bytes=(256 << 10) if tier == "host" else OPTIONS.host_bytes)
    harness = made(tiny, 16, tier, options)
    asked: list[tuple[str, int]] = []
    for burst in range(8):
        for i in range(source.randint(1, 4)):
            which = source.randrange(len(prompts))
            asked.append((f"{burst}-{i}", which))
            harness.send(sequence(asked[-1][0], prompts[which], sampling=GREEDY))
            harness.step()
        if source.random() < 0.3:
            harness.send(AbortSequence(seq_id=asked.pop()[0]))
        harness.run()
    for seq_id, which in asked:
        assert harness.tokens(seq_id) == expected[which], (seed, seq_id)
    assert any(ended.count for ended in harness.of(LoadEnded))
    counts = harness.pool.counts()
    assert (counts.used, counts.reserved, counts.quarantined) == (0, 0, 0)
