"""Several choices of one prompt in the scheduler: one sequence up to token 1, then as many as go on."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from kvstore.blocks import block_names, namespace_root
from kvstore.pool import BlockPool
from services.engine.intake import Limits
from services.engine.messages import AddSequence, ReserveSequence, Sampling, SequenceOutput, StartSequence
from services.engine.scheduler import Scheduler, Step
from services.engine.sequence import Phase

SIZE = 4
EOS = 1
ROOT = namespace_root(salt="", model="m", tokenizer="t", dtype="f", block_size=SIZE, layout_version=1)


def make(num_blocks: int = 32, max_seqs: int = 8) -> Scheduler:
    limits = Limits(num_blocks, SIZE, 256, vocab_size=1000, eos_token_ids=(EOS,))
    return Scheduler(BlockPool(num_blocks), limits, max_num_batched_tokens=16, max_num_seqs=max_seqs)


def request(seq_id: str, length: int, n: int, max_tokens: int = 8, hand_off: bool = False) -> AddSequence:
    first = 3 + 100 * (ord(seq_id[0]) - ord("a"))
    ids = tuple(range(first, first + length))
    names = tuple(block_names(ids, SIZE, ROOT))
    sampling = Sampling(max_tokens=max_tokens)
    return AddSequence(
        seq_id=seq_id, prompt_ids=ids, sampling=sampling, root=ROOT, block_names=names, n=n, hand_off=hand_off
    )


def step(scheduler: Scheduler, drawn: Mapping[int, int] | None = None) -> tuple[Step, list[SequenceOutput]]:
    """One step; choice i draws ``drawn[i]``, else 10 + i."""
    plan = scheduler.schedule()
    tokens = {key: (drawn or {}).get(choice, 10 + choice) for w in plan.work for key, choice in w.draws}
    outputs = scheduler.complete(plan, tokens, {})
    scheduler.roster.check()
    return plan, outputs


def test_one_sequence_computes_the_prompt_and_parts_with_token_1() -> None:
    scheduler = make()
    scheduler.add(request("a", 6, n=3))
    plan, outputs = step(scheduler)
    assert [(w.sequence.seq_id, w.count) for w in plan.work] == [("a", 6)]
    assert [(o.seq_id, o.choice, o.position, o.token_ids) for o in outputs] == [
        ("a", i, 0, (10 + i,)) for i in range(3)
    ]
    tables = [s.block_ids for s in scheduler.roster.running.values()]
    assert len({t[0] for t in tables}) == 1
    assert len({t[1] for t in tables}) == 3
    assert sorted(scheduler.roster.take_copies()) == sorted((tables[0][1], t[1]) for t in tables[1:])
    assert scheduler.roster.take_copies() == []
    plan, outputs = step(scheduler)
    assert [w.count for w in plan.work] == [1, 1, 1]
    assert sorted((o.choice, o.position) for o in outputs) == [(0, 1), (1, 1), (2, 1)]


def test_a_prompt_that_fills_its_blocks_has_nothing_to_copy() -> None:
    scheduler = make()
    scheduler.add(request("a", 8, n=3))
    step(scheduler)
    assert scheduler.roster.take_copies() == []
    assert scheduler.roster.pool.counts().used == 2
    step(scheduler)
    assert scheduler.roster.pool.counts().used == 2 + 3


def test_the_first_choice_that_goes_on_takes_over_the_blocks() -> None:
    scheduler = make()
    scheduler.add(request("a", 6, n=3))
    _, outputs = step(scheduler, {0: EOS, 1: EOS})
    assert [o.finish_reason for o in outputs] == ["stop", "stop", ""]
    assert scheduler.roster.take_copies() == []
    assert [s.choices for s in scheduler.roster.sequences.values()] == [(2,)]
    scheduler.drop("a", 1)
    scheduler.drop("nobody", 0)
    _, outputs = step(scheduler, {2: EOS})
    assert [(o.choice, o.finish_reason) for o in outputs] == [(2, "stop")]
    assert not scheduler.roster.sequences
    assert not scheduler.roster.groups


def test_a_choice_without_a_block_waits_and_computes_only_the_tail_again() -> None:
    scheduler = make(num_blocks=3)
    scheduler.add(request("a", 6, n=3, max_tokens=4))
    step(scheduler)
    phases = [s.phase for s in scheduler.roster.sequences.values()]
    assert phases == [Phase.RUNNING, Phase.RUNNING, Phase.WAITING]
    outputs: list[SequenceOutput] = []
    recomputed = 0
    while scheduler.roster.sequences:
        plan, new = step(scheduler)
        assert all(w.start >= SIZE for w in plan.work)
        recomputed += sum(max(0, min(w.stop, 6) - w.start) for w in plan.work)
        outputs += new
    assert recomputed >= 2
    assert sorted((o.choice, o.position) for o in outputs) == [(i, k) for i in range(3) for k in range(1, 4)]


def test_choices_count_for_the_slots_before_they_part() -> None:
    scheduler = make(max_seqs=4)
    scheduler.add(request("a", 20, n=3))
    scheduler.add(request("b", 20, n=1))
    scheduler.add(request("c", 20, n=1))
    plan, _ = step(scheduler)
    assert [w.sequence.seq_id for w in plan.work] == ["a"]
    plan, _ = step(scheduler)
    assert "b" in {w.sequence.seq_id for w in plan.work}
    assert "c" not in scheduler.roster.running
    assert scheduler.roster.running_choices == 4
    while scheduler.roster.sequences:
        plan, _ = step(scheduler)
        assert len(plan.work) <= 4


def test_a_reserve_holds_the_prompt_once_and_starts_what_goes_on() -> None:
    scheduler = make()
    scheduler.reserve(ReserveSequence(sequence=request("a", 10, n=4)))
    plan, _ = step(scheduler)
    assert [len(s.block_ids) for s in plan.reserved] == [3]
    assert scheduler.roster.num_reserved == 4
    scheduler.drop("a", 3)
    assert scheduler.roster.num_reserved == 3
    outputs = scheduler.start(StartSequence(seq_id="a", first_tokens=((1, 9), (2, 8), (3, 7))))
    scheduler.roster.check()
    assert [(o.choice, o.token_ids) for o in outputs] == [(1, (9,)), (2, (8,))]
    assert len(scheduler.roster.running) == 2
    assert len(scheduler.roster.take_copies()) == 1
    plan, _ = step(scheduler)
    assert all(w.is_decode for w in plan.work)


def test_a_reserve_of_which_nothing_goes_on_is_let_go() -> None:
    scheduler = make()
    scheduler.reserve(ReserveSequence(sequence=request("a", 10, n=2)))
    step(scheduler)
    assert scheduler.start(StartSequence(seq_id="a", first_tokens=())) == []
    scheduler.roster.check()
    assert scheduler.roster.pool.counts().free == 32


def test_a_hand_off_gives_every_first_token_and_holds_one_table() -> None:
    scheduler = make()
    scheduler.add(request("a", 6, n=3, hand_off=True))
    _, outputs = step(scheduler, {1: EOS})
    assert [(o.choice, o.finish_reason) for o in outputs] == [(0, ""), (1, "stop"), (2, "")]
    assert scheduler.roster.held_blocks == 2
    scheduler.drop("a", 0)
    assert scheduler.roster.held_blocks == 2
    scheduler.release("a")
    scheduler.roster.check()
    assert not scheduler.roster.groups


@pytest.mark.parametrize("parted", [False, True])
def test_an_abort_ends_the_whole_group_with_one_output(parted: bool) -> None:
    scheduler = make()
    scheduler.add(request("a", 6, n=3))
    if parted:
        step(scheduler)
    output = scheduler.abort("a")
    assert output is not None
    assert (output.seq_id, output.finish_reason) == ("a", "abort")
    scheduler.roster.check()
    assert not scheduler.roster.sequences
    assert scheduler.roster.pool.counts().used == 0
