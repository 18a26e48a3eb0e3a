"""Corrections, the step model and what is held: against numbers worked by hand."""

from __future__ import annotations

import random

import pytest

from services.protocol.proto import worker_pb2
from services.router.admission.held import Held, Sent
from services.router.admission.predict import MOST, MOST_SPREAD, AnswerLength, Corrections, StepModel, room_wait_ms
from services.router.bookings import Booking, Bookings


def test_a_correction_comes_to_the_ratio_that_is_seen_and_is_of_its_worker_alone() -> None:
    known = Corrections()
    assert known.of("p0", 0.0) == 1.0
    for _ in range(100):
        known.observe("p0", 100, 150, 0.0)
    assert known.of("p0", 0.0) == pytest.approx(1.5)
    assert known.of("p1", 0.0) == 1.0


def test_an_outlier_moves_a_correction_little_and_none_leaves_its_bounds() -> None:
    known = Corrections()
    for _ in range(50):
        known.observe("p0", 100, 100, 0.0)
    known.observe("p0", 100, 1e9, 0.0)
    assert 1.0 < known.of("p0", 0.0) < 1.2
    for _ in range(1000):
        known.observe("p0", 100, 1e9, 0.0)
        known.observe("p1", 1e9, 100, 0.0)
    assert known.of("p0", 0.0) == pytest.approx(MOST)
    assert known.of("p1", 0.0) == pytest.approx(1 / MOST)
    known.observe("p2", 0.1, 50, 0.0)
    assert known.of("p2", 0.0) == 1.0


def test_what_95_of_100_stay_below_follows_from_how_much_times_vary() -> None:
    draw, known, below = random.Random(2), Corrections(), []
    assert known.spread("p", 0.0) == 1.0
    for i in range(3000):
        actual = 100 * draw.lognormvariate(0.3, 0.15)
        if i > 100:
            below.append(actual <= 100 * known.of("p", 0.0) * known.spread("p", 0.0))
        known.observe("p", 100, actual, 0.0)
    assert 0.91 <= sum(below) / len(below) <= 0.98
    for _ in range(200):
        known.observe("q", 100, draw.choice([1, 10_000]), 0.0)
    assert known.spread("q", 0.0) == MOST_SPREAD


def test_what_was_learned_fades_so_that_refusals_do_not_stand_forever() -> None:
    known = Corrections()
    for ratio in (2, 8) * 50:
        known.observe("p", 100, 100 * ratio, 0.0)
    at_once = known.of("p", 0.0) * known.spread("p", 0.0)
    assert at_once > 4
    assert known.of("p", 15.0) == pytest.approx(known.of("p", 0.0) ** 0.5)
    assert known.of("p", 120.0) * known.spread("p", 120.0) < 1.2


def test_the_median_error_of_noisy_times_is_small_after_some_requests() -> None:
    draw, known, errors = random.Random(1), Corrections(), []
    for i in range(400):
        predicted = draw.uniform(50, 500)
        actual = predicted * 1.8 * draw.lognormvariate(0, 0.2)
        if i > 50:
            errors.append(abs(predicted * known.of("p", 0.0) - actual) / actual)
        known.observe("p", predicted, actual, 0.0)
    assert sorted(errors)[len(errors) // 2] < 0.25


def test_the_step_model_finds_a_line_and_extrapolates_it() -> None:
    model = StepModel()
    assert model.step_ms(8) == 0.0
    for _ in range(40):
        for n in (1, 4, 8):
            model.observe(n, 10 + 2 * n)
    assert model.step_ms(16) == pytest.approx(42)
    assert model.step_ms(1) == pytest.approx(12)


def test_one_batch_size_gives_a_flat_line_and_a_falling_one_counts_as_flat() -> None:
    flat, falling = StepModel(), StepModel()
    for _ in range(10):
        flat.observe(4, 20)
        for n in (1, 8):
            falling.observe(n, 30 - n)
    assert flat.step_ms(64) == pytest.approx(20)
    assert falling.step_ms(64) == pytest.approx(falling.step_ms(1))
    flat.observe(0, 5)
    flat.observe(3, float("nan"))
    assert flat.step_ms(4) == pytest.approx(20)


def test_the_step_model_forgets() -> None:
    model = StepModel()
    for step_ms in (100, 10):
        for _ in range(300):
            model.observe(2, step_ms)
    assert model.step_ms(2) == pytest.approx(10, rel=0.05)


def test_waiting_for_room_is_the_answers_that_have_to_end_before() -> None:
    assert room_wait_ms(1, 10, 20, 100) == 200
    length = AnswerLength(100)
    length.observe(200)
    assert length.tokens == 110


def booking(p: str = "p0", d: str = "d0", tokens: int = 100, sequences: int = 1) -> Booking:
    return Booking(prefill_id=p, prefill_tokens=tokens, decode_id=d, decode_blocks=7, sequences=sequences)


def test_a_prompt_counts_until_a_load_shows_it_and_then_as_the_load_says() -> None:
    held, load = Held(), worker_pb2.Load(prefill_tokens_per_s=1000)
    held.sent("a", Sent(booking=booking(), sent_s=1.0, tpot_ms=None))
    assert held.prompt_tokens("p0", load, 0.9, 1.0) == 100
    assert held.prompt_tokens("p0", load, 1.1, 1.1) == 100, "not accepted: the load cannot have it"
    held.accepted("a", 1.05)
    assert held.prompt_tokens("p0", load, 1.051, 1.1) == 100, "the load may have been on its way"
    load.waiting_prefill_tokens = 90
    assert held.prompt_tokens("p0", load, 1.2, 1.2) == 90
    assert held.prompt_tokens("p0", load, 1.2, 1.25) == pytest.approx(40)
    assert held.prompt_tokens("p0", load, 1.2, 9.0) == 0


def test_a_sequence_counts_from_its_first_token_to_its_end() -> None:
    held, load = Held(), worker_pb2.Load()
    held.sent("a", Sent(booking=booking(sequences=3), sent_s=1.0, tpot_ms=40))
    held.sent("b", Sent(booking=booking(), sent_s=1.0, tpot_ms=30))
    assert (held.decoding("d0", load), held.coming("d0")) == (0, 4)
    assert held.computed("a") is not None
    assert held.computed("a") is None
    assert (held.decoding("d0", load), held.coming("d0")) == (3, 1)
    assert held.decoding("d0", worker_pb2.Load(running=5, waiting=1)) == 6, "other routers' count too"
    assert held.tightest_tpot_ms("d0") == 30
    held.ended("b")
    assert held.tightest_tpot_ms("d0") == 40
    held.ended("a")
    held.ended("a")
    assert (len(held), held.coming("d0"), held._workers) == (0, 0, {})


def test_a_new_attempt_leaves_nothing_on_the_old_workers() -> None:
    held = Held()
    held.sent("a", Sent(booking=booking("p0", "d0"), sent_s=1.0, tpot_ms=None))
    held.sent("a", Sent(booking=booking("m0", "m0"), sent_s=2.0, tpot_ms=None))
    assert set(held._workers) == {"m0"}
    held.ended("a")
    assert held._workers == {}


def test_a_booking_that_was_never_sent_is_taken_back_whole() -> None:
    books = Bookings()
    books.book("b", booking(tokens=50))
    before = [books.queued_tokens("p0", 10), books.active_sequences("d0", 2), books.free_blocks("d0", 100)]
    books.book("a", booking())
    books.cancel("a")
    books.cancel("a")
    after = [books.queued_tokens("p0", 10), books.active_sequences("d0", 2), books.free_blocks("d0", 100)]
    assert after == before
    books.release("b")
    assert len(books) == 0
