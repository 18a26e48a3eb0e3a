"""Rules of the scheduler that a reader of its docstring would expect, one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvstore.blocks import block_names, namespace_root
from kvstore.pool import BlockPool
from services.engine.intake import Limits
from services.engine.messages import AddSequence, ReserveSequence, Sampling, SequenceOutput, StartSequence
from services.engine.scheduler import Scheduler, Step
from services.engine.sequence import Phase
from services.protocol.errors import ErrorCode, RequestError

EOS = 2
SIZE = 4
ROOT = namespace_root(salt="", model="m", tokenizer="t", dtype="f", block_size=SIZE, layout_version=1)


def make(num_blocks: int = 32, budget: int = 16, max_seqs: int = 8, max_model_len: int = 256) -> Scheduler:
    limits = Limits(num_blocks, SIZE, max_model_len, vocab_size=1000, eos_token_ids=(EOS,))
    return Scheduler(BlockPool(num_blocks), limits, max_num_batched_tokens=budget, max_num_seqs=max_seqs)


def request(seq_id: str, prompt: int | Sequence[int], **kwargs: Any) -> AddSequence:
    ids = tuple(prompt) if not isinstance(prompt, int) else tuple(range(3, 3 + prompt))
    sampling = kwargs.pop("sampling", Sampling(max_tokens=kwargs.pop("max_tokens", 8)))
    return AddSequence(
        seq_id=seq_id,
        prompt_ids=ids,
        sampling=sampling,
        root=ROOT,
        block_names=tuple(block_names(ids, SIZE, ROOT)),
        **kwargs,
    )


def step(
    scheduler: Scheduler, token: int = 9, failures: dict[str, str] | None = None
) -> tuple[Step, list[SequenceOutput]]:
    plan = scheduler.schedule()
    tokens = {w.sequence.seq_id: token for w in plan.work if w.samples}
    outputs = scheduler.complete(plan, tokens, failures or {})
    scheduler.roster.check()
    return plan, outputs


def counts(plan: Step) -> dict[str, int]:
    return {w.sequence.seq_id: w.count for w in plan.work}


def test_a_prompt_is_cut_into_chunks_and_its_end_gives_the_first_token() -> None:
    scheduler = make(budget=16)
    scheduler.add(request("a", 40))
    plans = [step(scheduler) for _ in range(4)]
    assert [counts(p)["a"] for p, _ in plans] == [16, 16, 8, 1]
    assert [len(o) for _, o in plans] == [0, 0, 1, 1]
    assert plans[2][1][0].position == 0


def test_decodes_come_before_prefill_chunks() -> None:
    scheduler = make(budget=8)
    scheduler.add(request("a", 4))
    step(scheduler)
    scheduler.add(request("b", 20))
    plan, _ = step(scheduler)
    assert counts(plan) == {"a": 1, "b": 7}
    assert plan.work[0].is_decode


def test_a_short_prompt_does_not_wait_for_a_long_one_before_it() -> None:
    scheduler = make(num_blocks=64, budget=16)
    scheduler.add(request("long", 100))
    step(scheduler)
    scheduler.add(request("short", [50, 51, 52, 53, 54]))
    plan, outputs = step(scheduler)
    assert counts(plan) == {"long": 11, "short": 5}
    assert [o.seq_id for o in outputs] == ["short"]


def test_two_long_prompts_run_one_after_the_other() -> None:
    scheduler = make(num_blocks=64, budget=16)
    scheduler.add(request("first", 50))
    scheduler.add(request("second", range(40, 90)))
    assert counts(step(scheduler)[0]) == {"first": 16}


def test_lower_priority_goes_first_even_before_a_running_prefill() -> None:
    scheduler = make(num_blocks=64, budget=16)
    scheduler.add(request("later", 50, priority=1))
    step(scheduler)
    scheduler.add(request("urgent", range(40, 90), priority=0))
    assert list(counts(step(scheduler)[0])) == ["urgent"]


def test_a_request_without_room_lets_a_smaller_one_pass() -> None:
    scheduler = make(num_blocks=8, budget=64)
    scheduler.add(request("running", 16, max_tokens=8))
    step(scheduler)
    scheduler.add(request("large", range(30, 50), max_tokens=8))
    scheduler.add(request("small", [60, 61], max_tokens=2))
    plan, _ = step(scheduler)
    assert "small" in counts(plan)
    assert plan.waiting == {"blocks": 1}
    while "large" in scheduler.roster.sequences:
        step(scheduler)


@pytest.mark.parametrize(("prompt", "max_tokens"), [(33, 1), (16, 18)])
def test_what_never_fits_is_refused_at_once_with_need_and_capacity(prompt: int, max_tokens: int) -> None:
    scheduler = make(num_blocks=8)
    with pytest.raises(RequestError, match=r"9 blocks; the worker has 8 blocks, 32 tokens") as refused:
        scheduler.add(request("a", prompt, max_tokens=max_tokens))
    assert refused.value.code is ErrorCode.NEVER_FITS
    scheduler.add(request("b", 16, max_tokens=17))
    assert "b" in counts(step(scheduler)[0])


def test_a_hand_off_needs_room_for_its_prompt_only() -> None:
    scheduler = make(num_blocks=8, budget=64)
    scheduler.add(request("a", 32, max_tokens=100, hand_off=True))
    assert counts(step(scheduler)[0]) == {"a": 32}


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (request("a", []), ErrorCode.INVALID_REQUEST),
        (request("a", [3, 1000]), ErrorCode.INVALID_REQUEST),
        (request("a", [3], output_ids=(-1,)), ErrorCode.INVALID_REQUEST),
        (request("a", 256), ErrorCode.CONTEXT_LENGTH_EXCEEDED),
        (request("a", 4, max_tokens=0), ErrorCode.INVALID_REQUEST),
        (request("a", 4, max_tokens=2, output_ids=(5, 6)), ErrorCode.INVALID_REQUEST),
        (request("a", 4, sampling=Sampling(temperature=float("nan"))), ErrorCode.INVALID_REQUEST),
        (request("a", 4, sampling=Sampling(top_p=1.5)), ErrorCode.INVALID_REQUEST),
        (request("a", 4, sampling=Sampling(stop_token_ids=(1000,))), ErrorCode.INVALID_REQUEST),
        (
            AddSequence(seq_id="a", prompt_ids=(3,), sampling=Sampling(), root=ROOT, block_names=(ROOT,)),
            ErrorCode.INVALID_REQUEST,
        ),
        (AddSequence(seq_id="a", prompt_ids=(3,), sampling=Sampling(), root=b"short"), ErrorCode.INVALID_REQUEST),
    ],
)
def test_nonsense_is_refused_before_it_takes_a_place(message: AddSequence, code: ErrorCode) -> None:
    scheduler = make(num_blocks=128)
    with pytest.raises(RequestError) as refused:
        scheduler.add(message)
    assert refused.value.code is code
    assert not scheduler.roster.sequences


def test_a_sequence_is_not_taken_twice() -> None:
    scheduler = make()
    scheduler.add(request("a", 4))
    with pytest.raises(RequestError, match="here already"):
        scheduler.add(request("a", 4))


@pytest.mark.parametrize("length", [1, SIZE, 3 * SIZE, 3 * SIZE + 1])
def test_a_prompt_found_whole_still_computes_its_last_token(length: int) -> None:
    scheduler = make()
    for seq_id in ("a", "b"):
        scheduler.add(request(seq_id, length, max_tokens=1))
        plan, outputs = step(scheduler)
    hit = (length - 1) // SIZE * SIZE
    assert outputs[0].cached_tokens == hit
    assert counts(plan) == {"b": length - hit}


def test_equal_prompts_at_once_compute_their_common_prefix_once() -> None:
    scheduler = make(num_blocks=64, budget=64)
    for i in range(4):
        scheduler.add(request(str(i), 20))
    total = 0
    while len([s for s in scheduler.roster.sequences.values() if s.num_outputs]) < 4:
        plan, _ = step(scheduler)
        total += sum(w.count for w in plan.work if not w.is_decode)
    assert total == 20 + 3 * 4


def test_generated_tokens_get_names_too() -> None:
    scheduler = make()
    scheduler.add(request("a", 4, max_tokens=9))
    while scheduler.roster.sequences:
        step(scheduler, token=7)
    scheduler.add(request("b", [3, 4, 5, 6] + [7] * 9, max_tokens=1))
    assert step(scheduler)[1][0].cached_tokens == 12


def test_names_that_contradict_the_pool_stay_with_their_sender() -> None:
    scheduler = make()
    scheduler.add(request("a", 8, max_tokens=1))
    step(scheduler)
    names = block_names(range(3, 11), SIZE, ROOT)
    wrong = AddSequence(
        seq_id="b", prompt_ids=tuple(range(50, 60)), sampling=Sampling(max_tokens=4), root=ROOT, block_names=(names[1],)
    )
    scheduler.add(wrong)
    while scheduler.roster.sequences:
        step(scheduler)
    assert scheduler.roster.bad_names == 1
    scheduler.add(request("c", 9, max_tokens=1))
    assert step(scheduler)[1][0].cached_tokens == 8


def test_the_last_in_order_is_preempted_and_resumes_with_its_tokens() -> None:
    scheduler = make(num_blocks=6, budget=64)
    scheduler.add(request("old", range(10, 18), max_tokens=16))
    scheduler.add(request("young", range(30, 38), max_tokens=16))
    preempted, outputs = [], {"old": [], "young": []}
    for n in range(200):
        if not scheduler.roster.sequences:
            break
        _, done = step(scheduler, token=n % 90 + 5)
        preempted += [s.seq_id for s in scheduler.roster.queue if s.was_placed]
        for output in done:
            assert output.position == len(outputs[output.seq_id])
            outputs[output.seq_id] += output.token_ids
    assert set(preempted) == {"young"}
    assert scheduler.roster.preemptions == 1
    assert {k: len(v) for k, v in outputs.items()} == {"old": 16, "young": 16}
    assert scheduler.roster.prompt_tokens_cached == 0  # what it finds of its own is no hit


def test_a_hand_off_holds_its_blocks_until_it_is_released() -> None:
    scheduler = make()
    scheduler.add(request("a", 10, hand_off=True))
    _, outputs = step(scheduler)
    assert outputs[0].finish_reason == ""
    assert scheduler.roster.sequences["a"].phase is Phase.HELD
    assert scheduler.roster.pool.counts().used == 3
    assert not step(scheduler)[0].work
    scheduler.release("a")
    assert scheduler.roster.pool.counts().cached == 2
    scheduler.release("a")


@pytest.mark.parametrize(
    ("sampling", "token", "reason"),
    [
        (Sampling(max_tokens=8), EOS, "stop"),
        (Sampling(max_tokens=8, ignore_eos=True), EOS, ""),
        (Sampling(max_tokens=8, min_tokens=1), EOS, ""),
        (Sampling(max_tokens=8, stop_token_ids=(7,)), 7, "stop"),
        (Sampling(max_tokens=1), 9, "length"),
    ],
)
def test_token_one_of_a_hand_off_may_end_it(sampling: Sampling, token: int, reason: str) -> None:
    scheduler = make()
    scheduler.add(request("a", 10, sampling=sampling, hand_off=True))
    assert step(scheduler, token)[1][0].finish_reason == reason
    assert scheduler.roster.sequences["a"].phase is Phase.HELD


def test_hand_offs_that_hold_half_the_pool_stop_new_ones_but_not_whole_requests() -> None:
    scheduler = make(num_blocks=8, budget=64)
    scheduler.add(request("a", 16, hand_off=True))
    step(scheduler)
    scheduler.add(request("b", [50, 51], hand_off=True))
    scheduler.add(request("c", [60, 61]))
    assert list(counts(step(scheduler)[0])) == ["c"]
    scheduler.release("a")
    assert "b" in counts(step(scheduler)[0])


def test_what_nobody_fetches_fills_half_the_pool_and_one_prompt_more_at_most() -> None:
    scheduler = make(num_blocks=40, budget=12, max_seqs=8)
    prompts = {f"p{i}": range(100 + 30 * i, 130 + 30 * i) for i in range(8)}  # of eight blocks
    for seq_id, prompt in prompts.items():
        scheduler.add(request(seq_id, prompt, hand_off=True))
    held: list[str] = []
    ended: list[str] = []
    while len(ended) < len(prompts):
        plan, outputs = step(scheduler)
        held += [o.seq_id for o in outputs]
        assert scheduler.roster.held_blocks <= 20 + 8
        if not plan.work:
            assert plan.waiting["hand-offs hold half the pool"] or len(held) + len(ended) == len(prompts)
            ended.append(held.pop(0))
            scheduler.release(ended[-1])
    assert scheduler.roster.pool.counts().used == 0


def test_a_decode_without_a_block_leaves_its_slot_to_the_hand_off_that_holds_one() -> None:
    scheduler = make(num_blocks=8, budget=1, max_seqs=1)
    scheduler.reserve(ReserveSequence(sequence=request("d", 16, max_tokens=8)))
    step(scheduler)
    scheduler.add(request("h", range(50, 66), hand_off=True))
    for _ in range(15):
        step(scheduler)  # all but its last token
    scheduler.start(StartSequence(seq_id="d", first_tokens=((0, 9),)))
    plan, outputs = step(scheduler)
    assert counts(plan) == {"h": 1}
    assert [o.seq_id for o in outputs] == ["h"]
    assert not step(scheduler)[0].work
    scheduler.release("h")
    assert counts(step(scheduler)[0]) == {"d": 1}


def test_a_reserve_gets_blocks_is_started_and_computes_no_prompt() -> None:
    scheduler = make()
    scheduler.reserve(ReserveSequence(sequence=request("a", 10, max_tokens=3)))
    plan, _ = step(scheduler)
    assert [s.seq_id for s in plan.reserved] == ["a"]
    assert not plan.work
    assert scheduler.roster.pool.counts().reserved == 3
    (first,) = scheduler.start(StartSequence(seq_id="a", first_tokens=((0, 9),)))
    assert (first.position, first.token_ids) == (0, (9,))
    assert scheduler.roster.pool.lookup(block_names(range(3, 13), SIZE, ROOT)) == 2
    done = []
    while scheduler.roster.sequences:
        plan, outputs = step(scheduler)
        assert all(w.is_decode for w in plan.work)
        done += outputs
    assert [o.position for o in done] == [1, 2]
    assert done[-1].finish_reason == "length"


def test_a_reserve_found_whole_has_nothing_to_receive() -> None:
    scheduler = make()
    scheduler.add(request("a", 8, max_tokens=1))
    step(scheduler)
    scheduler.reserve(ReserveSequence(sequence=request("b", 8)))
    plan, _ = step(scheduler)
    assert plan.reserved[0].num_named_blocks == len(plan.reserved[0].block_ids) == 2


def test_reserves_wait_in_order_while_the_pool_is_full() -> None:
    scheduler = make(num_blocks=4)
    for i, seq_id in enumerate("abc"):
        ids = range(10 * i + 10, 10 * i + 18)
        scheduler.reserve(ReserveSequence(sequence=request(seq_id, ids, max_tokens=2)))
    assert [s.seq_id for s in step(scheduler)[0].reserved] == ["a"]
    scheduler.abort("a")
    assert [s.seq_id for s in step(scheduler)[0].reserved] == ["b"]


def test_a_lost_reserve_is_quarantined_until_its_fence() -> None:
    scheduler = make(num_blocks=4)
    scheduler.reserve(ReserveSequence(sequence=request("a", 8)))
    step(scheduler)
    output = scheduler.abort("a", quarantine=True)
    assert output is not None
    assert output.finish_reason == "abort"
    assert scheduler.roster.pool.counts().quarantined == 2
    scheduler.reserve(ReserveSequence(sequence=request("b", 12, max_tokens=2)))
    assert not step(scheduler)[0].reserved
    scheduler.roster.pool.unquarantine("a")
    assert step(scheduler)[0].reserved


def test_reserves_do_not_take_the_blocks_of_a_preempted_sequence() -> None:
    scheduler = make(num_blocks=6, budget=64)
    scheduler.add(request("old", range(10, 18), max_tokens=16))
    scheduler.add(request("young", range(30, 38), max_tokens=16))
    while not scheduler.roster.preemptions:
        step(scheduler)
    scheduler.reserve(ReserveSequence(sequence=request("new", [90, 91], max_tokens=2)))
    assert not step(scheduler)[0].reserved


def test_a_start_for_an_unknown_sequence_changes_nothing() -> None:
    scheduler = make()
    assert scheduler.start(StartSequence(seq_id="a", first_tokens=((0, 9),))) == []
    assert scheduler.abort("a") is None


def test_a_failed_sequence_ends_alone() -> None:
    scheduler = make()
    scheduler.add(request("a", 4))
    scheduler.add(request("b", [50, 51]))
    _, outputs = step(scheduler, failures={"a": "broken"})
    ends = {o.seq_id: (o.finish_reason, o.error) for o in outputs}
    assert ends == {"a": ("error", "broken"), "b": ("", "")}
    assert list(scheduler.roster.sequences) == ["b"]


def test_outputs_that_came_along_are_computed_and_the_next_position_follows_them() -> None:
    scheduler = make()
    scheduler.add(request("a", 6, output_ids=(8, 9, 10), max_tokens=5))
    plan, outputs = step(scheduler)
    assert counts(plan) == {"a": 9}
    assert outputs[0].position == 3
    assert step(scheduler)[1][0].finish_reason == "length"


def test_the_context_ends_a_sequence() -> None:
    scheduler = make(max_model_len=12)
    scheduler.add(request("a", 10, max_tokens=100))
    assert step(scheduler)[1][0].finish_reason == ""
    assert step(scheduler)[1][0].finish_reason == "length"


def test_no_step_runs_more_sequences_than_allowed() -> None:
    scheduler = make(max_seqs=2, budget=64)
    for i in range(5):
        scheduler.add(request(str(i), [10 * i + 5], max_tokens=3))
    while scheduler.roster.sequences:
        assert len(step(scheduler)[0].work) <= 2


def test_when_decodes_exceed_the_budget_they_take_turns() -> None:
    scheduler = make(budget=2)
    for i in range(3):
        scheduler.reserve(ReserveSequence(sequence=request(str(i), [10 * i + 5], max_tokens=20)))
    step(scheduler)
    for i in range(3):
        scheduler.start(StartSequence(seq_id=str(i), first_tokens=((0, 9),)))
    for _ in range(12):
        assert len(step(scheduler)[0].work) == 2
    outputs = [s.num_outputs for s in scheduler.roster.sequences.values()]
    assert max(outputs) - min(outputs) <= 1
