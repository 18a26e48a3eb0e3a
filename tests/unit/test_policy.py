"""Decisions on small clusters whose right answer is plain."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from services.router.bookings import Booking, Bookings
from services.router.policy import COPY, DELAY, Fabric, Prompt, Worker, capacity, choose, uncached_tokens

PROMPT = Prompt(num_tokens=512, block_size=16, token_bytes=1000, num_layers=4)
FAST = Fabric(default_bytes_per_s=1e12)


def prefill(worker_id: str, **known: object) -> Worker:
    return Worker(**{"worker_id": worker_id, "role": "prefill", "num_blocks": 1000, "free_blocks": 1000} | known)


def decode(worker_id: str, **known: object) -> Worker:
    return Worker(**{"worker_id": worker_id, "role": "decode", "num_blocks": 1000, "free_blocks": 1000} | known)


def mixed(worker_id: str, **known: object) -> Worker:
    return replace(decode(worker_id, **known), role="mixed")


def pick(*workers: Worker, policy: str = "cost", prompt: Prompt = PROMPT, fabric: Fabric = FAST, turn: int = 0) -> str:
    decision = choose(policy, prompt, workers, fabric, turn)
    assert decision is not None
    return f"{decision.choice.prefill_id}>{decision.choice.decode_id}"


def test_a_repeated_prompt_goes_to_the_warm_worker_when_idle() -> None:
    assert pick(prefill("p0"), prefill("p1", cached_blocks=31), decode("d0")) == "p1>d0"


def test_a_cold_idle_worker_wins_over_a_warm_one_with_a_long_queue() -> None:
    warm = prefill("p1", cached_blocks=31, queued_tokens=2000)
    assert pick(prefill("p0"), warm, decode("d0")) == "p0>d0"


def test_ties_go_to_the_lowest_ids() -> None:
    workers = [decode("d1"), prefill("p1"), decode("d0"), prefill("p0")]
    assert pick(*workers) == "p0>d0"
    assert pick(*reversed(workers)) == "p0>d0"


def test_the_reader_that_holds_the_prompt_is_chosen_where_the_wire_is_slow() -> None:
    slow = Fabric(default_bytes_per_s=1e5)
    assert pick(prefill("p0"), decode("d0"), decode("d1", cached_blocks=20), fabric=slow) == "p0>d1"


def test_a_slow_pair_is_avoided_for_a_fast_one() -> None:
    fabric = Fabric(default_bytes_per_s=1e9, measured={("p0", "d0"): 1e5})
    assert pick(prefill("p0"), decode("d0"), decode("d1"), fabric=fabric) == "p0>d1"


def test_a_reader_without_room_is_avoided() -> None:
    assert pick(prefill("p0"), decode("d0", free_blocks=10, active_sequences=1), decode("d1")) == "p0>d1"


def test_readers_share_the_load() -> None:
    assert pick(prefill("p0"), decode("d0", active_sequences=3), decode("d1", active_sequences=2)) == "p0>d1"


def test_a_mixed_worker_competes_with_pairs_by_the_same_cost() -> None:
    busy = prefill("p0", queued_tokens=500)
    assert pick(busy, decode("d0"), mixed("m0")) == "m0>"
    assert pick(prefill("p0"), decode("d0"), mixed("m0", active_sequences=8, queued_tokens=100)) == "p0>d0"


def test_two_mixed_workers_never_hand_off_to_each_other() -> None:
    decision = choose("cost", PROMPT, [mixed("m0"), mixed("m1")], FAST)
    assert decision is not None
    assert {(c.prefill_id, c.decode_id) for c in decision.candidates} == {("m0", ""), ("m1", "")}


def test_a_worker_too_small_for_the_prompt_is_no_candidate() -> None:
    assert pick(prefill("p0", num_blocks=31), prefill("p1"), decode("d0")) == "p1>d0"
    assert choose("cost", PROMPT, [prefill("p0"), decode("d0", num_blocks=31)], FAST) is None
    assert capacity([prefill("p0"), decode("d0", num_blocks=31), mixed("m0", num_blocks=30)]) == 31


def test_without_a_full_pair_there_is_no_decision() -> None:
    assert choose("cost", PROMPT, [prefill("p0")], FAST) is None
    assert choose("cost", PROMPT, [], FAST) is None


def test_the_last_token_is_always_computed() -> None:
    assert uncached_tokens(PROMPT, 32) == 16
    assert uncached_tokens(replace(PROMPT, num_tokens=513), 32) == 1


def test_round_robin_takes_every_pair_in_turn() -> None:
    workers = [prefill("p0"), prefill("p1"), decode("d0"), decode("d1"), mixed("m0")]
    seen = Counter(pick(*workers, policy="round-robin", turn=t) for t in range(60))
    assert seen == {"p0>d0": 10, "p0>d1": 10, "p1>d0": 10, "p1>d1": 10, "m0>": 20}


def test_least_loaded_looks_at_the_prefill_queue_then_at_the_reader() -> None:
    workers = [prefill("p0", queued_tokens=5), prefill("p1"), decode("d0", active_sequences=1), decode("d1")]
    assert pick(*workers, policy="least-loaded") == "p1>d1"


def test_an_unknown_policy_is_refused_by_the_name_of_its_setting() -> None:
    with pytest.raises(ValueError, match=r"router\.policy"):
        choose("best", PROMPT, [mixed("m0")], FAST)


def test_a_decision_can_be_explained() -> None:
    decision = choose("cost", PROMPT, [prefill("p0", queued_tokens=100), prefill("p1"), decode("d0")], FAST)
    assert decision is not None
    first, second = decision.candidates
    assert (first.prefill_id, second.prefill_id, decision.considered) == ("p1", "p0", 2)
    assert second.terms.queue_ms == pytest.approx(100)
    assert first.terms.compute_ms == pytest.approx(512)
    assert second.terms.cost_ms - first.terms.cost_ms == pytest.approx(100)


def test_transfer_costs_only_what_computing_does_not_hide() -> None:
    # 512 ms of computing over 4 layers hide 384 ms of 512 000 bytes at 1 MB/s, which take 512 ms.
    decision = choose("cost", PROMPT, [prefill("p0"), decode("d0")], Fabric(default_bytes_per_s=1e6))
    assert decision is not None
    assert decision.choice.terms.transfer_ms == pytest.approx(128)


def booking(prefill_id: str = "p0", tokens: int = 100, decode_id: str = "d0", blocks: int = 7) -> Booking:
    return Booking(prefill_id=prefill_id, prefill_tokens=tokens, decode_id=decode_id, decode_blocks=blocks)


def test_a_booking_counts_at_once_and_ends_with_its_request() -> None:
    ledger = Bookings()
    ledger.book("a", booking())
    ledger.book("b", booking())
    assert ledger.queued_tokens("p0", 0) == 200
    assert ledger.active_sequences("d0", 0) == 2
    assert ledger.free_blocks("d0", 100) == 86
    ledger.prefill_done("a")
    assert ledger.queued_tokens("p0", 0) == 100
    ledger.release("a")
    ledger.release("b")
    assert (ledger.queued_tokens("p0", 0), ledger.active_sequences("d0", 0), len(ledger)) == (0, 0, 0)


def test_a_load_covers_what_was_booked_before_it_and_is_never_added_twice() -> None:
    ledger = Bookings()
    ledger.book("a", booking())
    ledger.load_came("p0")
    assert ledger.queued_tokens("p0", 100) == 100  # the load has it
    assert ledger.queued_tokens("p0", 0) == 100  # the load was sent before it arrived
    ledger.book("b", booking(tokens=30))
    assert ledger.queued_tokens("p0", 100) == 130
    ledger.prefill_done("a")
    assert ledger.queued_tokens("p0", 100) == 30  # the load is older than the end of a


def test_a_request_tried_again_is_booked_once() -> None:
    ledger = Bookings()
    ledger.book("a", booking("p0"))
    ledger.book("a", booking("p1"))
    assert (ledger.queued_tokens("p0", 0), ledger.queued_tokens("p1", 0), len(ledger)) == (0, 100, 1)
    assert ledger.active_sequences("d0", 0) == 1


def test_a_mixed_worker_is_booked_on_both_sides_and_left_clean() -> None:
    ledger = Bookings()
    ledger.book("a", booking("m0", decode_id="m0"))
    assert (ledger.queued_tokens("m0", 0), ledger.active_sequences("m0", 0)) == (100, 1)
    ledger.release("a")
    ledger.release("a")
    assert (ledger.queued_tokens("m0", 0), ledger.active_sequences("m0", 0)) == (0, 0)


# --- loading KV from another worker ---

PULLS = Fabric(default_bytes_per_s=1e9, pull_setup_ms=10.0)  # 0.016 ms a block against 16 to compute it


def pulls(*workers: Worker, fabric: Fabric = PULLS) -> tuple[str, str, int]:
    """Prefill worker of the choice, whom it loads from, and how deep that one is."""
    decision = choose("cost", PROMPT, workers, fabric)
    assert decision is not None
    assert decision.choice in decision.candidates
    return decision.choice.prefill_id, decision.choice.holder_id, decision.choice.held_blocks


def test_a_conversation_is_sent_back_by_the_decode_worker_that_holds_it() -> None:
    assert pulls(prefill("p0", cached_blocks=10), decode("d0", cached_blocks=20)) == ("p0", "d0", 20)


def test_a_pull_is_part_of_the_explained_decision() -> None:
    decision = choose("cost", PROMPT, [prefill("p0", cached_blocks=10), decode("d0", cached_blocks=20)], PULLS)
    assert decision is not None
    terms = decision.choice.terms
    assert terms.load_ms == pytest.approx(10 + 1000 * 160 * 1000 / 1e9)
    assert terms.compute_ms == pytest.approx(512 - 20 * 16)
    assert terms.cost_ms == pytest.approx(terms.load_ms + terms.compute_ms)


def test_what_is_slower_to_load_than_to_compute_is_computed() -> None:
    worker = prefill("p0", cached_blocks=19, prefill_tokens_per_s=10_000)  # a block in 1.6 ms
    assert pulls(worker, decode("d0", cached_blocks=20)) == ("p0", "", 0)
    slow = replace(PULLS, measured={("d0", "p0"): 1.0})
    assert pulls(prefill("p0"), decode("d0", cached_blocks=20), fabric=slow) == ("p0", "", 0)


def test_nothing_is_loaded_where_pulls_are_off() -> None:
    assert pulls(prefill("p0"), decode("d0", cached_blocks=20), fabric=replace(PULLS, pull_setup_ms=None))[1] == ""


def test_any_deeper_worker_may_send_and_the_decode_worker_of_the_pair_wins_ties() -> None:
    d0, d1, d2 = (decode(f"d{i}", cached_blocks=20 + (i == 2)) for i in range(3))
    assert pulls(prefill("p0"), d0, d1) == ("p0", "d0", 20)
    assert pulls(prefill("p0"), replace(d0, cached_blocks=0), d1) == ("p0", "d1", 20)  # d1 is the reader, too
    assert pulls(prefill("p0"), d0, replace(d2, num_blocks=0)) == ("p0", "d2", 21)
    assert pulls(prefill("p0"), prefill("p1", cached_blocks=20, queued_tokens=9000), decode("d0")) == ("p0", "p1", 20)


def test_the_reader_that_holds_the_prompt_sends_it_rather_than_an_equal_other() -> None:
    slow_to_d1 = replace(PULLS, measured={("p0", "d0"): 1e5})
    workers = prefill("p0"), decode("d0", cached_blocks=20), decode("d1", cached_blocks=20)
    assert pulls(*workers, fabric=slow_to_d1) == ("p0", "d1", 20)


def test_nothing_is_loaded_over_another_transport_or_by_a_mixed_worker() -> None:
    holder = decode("d0", cached_blocks=20, transport="tcp")
    assert pulls(prefill("p0", transport="mooncake"), holder)[1] == ""
    assert pulls(prefill("p0", transport="tcp"), holder)[1] == "d0"
    assert pulls(mixed("m0"), holder)[1] == ""


def test_a_full_hit_of_the_holder_still_computes_the_last_token() -> None:
    assert pulls(prefill("p0"), decode("d0", cached_blocks=32)) == ("p0", "d0", 31)


# --- what a load says, and what of it this router knows already ---


def test_hits_of_prompts_that_wait_are_not_in_the_queue_though_loads_count_them() -> None:
    ledger = Bookings()
    ledger.book("a", replace(booking(tokens=100), prompt_tokens=1000))
    ledger.load_came("p0")
    assert ledger.queued_tokens("p0", 1000) == 100  # the load does not foresee the 900 cached ones
    assert ledger.queued_tokens("p0", 1600) == 700  # another router's 600


def test_what_was_computed_since_the_last_first_token_is_no_longer_queued() -> None:
    ledger = Bookings()
    ledger.book("a", replace(booking(tokens=500), prompt_tokens=500))
    ledger.book("b", replace(booking(tokens=300), prompt_tokens=400))
    ledger.load_came("p0", 10_000)
    ledger.load_came("p0", 10_200)
    assert ledger.queued_tokens("p0", 700) == 600
    ledger.prefill_done("a")
    assert ledger.queued_tokens("p0", 700) == 300  # the load is older than the end of a
    ledger.load_came("p0", 10_500)
    assert ledger.queued_tokens("p0", 400) == 300
    ledger.load_came("p0", 20)  # another process took the name
    assert ledger.queued_tokens("p0", 400) == 300


def test_a_hand_off_to_another_reader_queues_nothing() -> None:
    ledger = Bookings()
    ledger.book("a", replace(booking(tokens=0), prompt_tokens=1000))
    ledger.load_came("p0")
    assert ledger.queued_tokens("p0", 700) == 700
    ledger.cancel("a")
    assert ledger.queued_tokens("p0", 700) == 700


# --- what computing costs others ---


def test_a_busy_cluster_pays_some_waiting_for_a_hit_that_an_idle_one_would_not() -> None:
    cold, warm = prefill("p0"), prefill("p1", cached_blocks=10, queued_tokens=200)  # 200 ms to wait, 160 to compute
    assert pick(cold, warm, decode("d0")) == "p0>d0"
    assert pick(replace(cold, active_sequences=3), replace(warm, active_sequences=1), decode("d0")) == "p1>d0"


def test_delay_is_priced_by_the_crowd_of_all_prefill_workers() -> None:
    decision = choose("cost", PROMPT, [prefill("p0", active_sequences=3), prefill("p1"), decode("d0")], FAST)
    assert decision is not None
    assert [c.terms.delay_ms for c in decision.candidates] == [pytest.approx(0.5 * 1.5 * 512)] * 2


# --- what a copy takes the place of ---


def test_a_full_worker_loads_no_copy_of_what_another_has_for_a_little_less_waiting() -> None:
    warm = prefill("p1", cached_blocks=20, queued_tokens=100, full_share=1.0)
    assert pulls(prefill("p0"), warm, decode("d0")) == ("p0", "p1", 20)  # 207 ms against 292
    assert pulls(prefill("p0", full_share=1.0), warm, decode("d0")) == ("p1", "", 0)
    assert pulls(prefill("p0", full_share=1.0), replace(warm, queued_tokens=900), decode("d0")) == ("p0", "p1", 20)


def test_a_copy_is_priced_as_the_computing_of_what_it_drives_out_with_the_delay_of_that() -> None:
    workers = prefill("p0", full_share=0.5, active_sequences=4), prefill("p1", cached_blocks=20, full_share=1.0)
    decision = choose("cost", PROMPT, [*workers, decode("d0", cached_blocks=31, full_share=1.0)], FAST)
    assert decision is not None
    copies = {c.prefill_id: c.terms.copy_ms for c in decision.candidates}
    assert copies == {"p0": pytest.approx(COPY * 0.5 * 320 * (1 + DELAY * 2)), "p1": 0}  # what d0 has is no copy
    for t in (c.terms for c in decision.candidates):
        assert t.cost_ms == pytest.approx(t.queue_ms + t.compute_ms + t.pressure_ms + t.delay_ms + t.copy_ms)
