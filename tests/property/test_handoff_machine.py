"""The hand-off under everything that can go wrong at once: real writer, reader, engines, pools and sessions, and after
each event no block is in two hands, none is lost, nothing is committed twice and nothing wrong is decoded."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from services.protocol.handoff import ARROWS
from tests.property import handoff_driver as driver
from tests.property.handoff_wire import Weather
from tests.property.handoff_world import Calls, HandoffWorld

decoders = st.sampled_from(driver.DECODERS)
nodes = st.sampled_from(["P", *driver.DECODERS])
picks = st.integers(0, 63)
prompts = st.sampled_from(driver.PROMPTS)


class HandoffMachine(RuleBasedStateMachine):
    """Requests come; workers, their transfer processes, calls and writes fail; the router aborts and retargets."""

    @initialize(seed=st.integers(0, 1 << 16), asks_once=st.booleans())
    def start(self, seed: int, asks_once: bool) -> None:
        self.world = HandoffWorld(seed, asks_once=asks_once)

    @rule(prompt=prompts, decode=decoders, max_tokens=st.sampled_from([1, 4, 12]))
    def submit(self, prompt: list[int], decode: str, max_tokens: int) -> None:
        driver.submit(self.world, prompt, decode, max_tokens, remaining_ms=20_000)

    @rule(prompt=prompts, decode=decoders, remaining_ms=st.sampled_from([300, 3_000]))
    def submit_in_a_hurry(self, prompt: list[int], decode: str, remaining_ms: int) -> None:
        driver.submit(self.world, prompt, decode, 4, remaining_ms)

    @rule(pick=picks, decode=decoders)
    def next_turn(self, pick: int, decode: str) -> None:
        driver.next_turn(self.world, pick, decode)

    @rule(seconds=st.sampled_from(driver.WAITS_S))
    def wait(self, seconds: float) -> None:
        self.world.run_for(seconds)

    @rule(pick=picks, where=nodes)
    def abort(self, pick: int, where: str) -> None:
        driver.abort(self.world, pick, where)

    @rule(pick=picks, decode=decoders)
    def retarget(self, pick: int, decode: str) -> None:
        driver.retarget(self.world, pick, decode)

    @rule(weather=st.sampled_from(driver.WEATHERS))
    def wire_changes(self, weather: Weather) -> None:
        self.world.weather = weather

    @rule(calls=st.sampled_from(driver.CALLS))
    def calls_change(self, calls: Calls) -> None:
        self.world.calls = calls

    @rule(decode=decoders, is_cut=st.booleans())
    def cut(self, decode: str, is_cut: bool) -> None:
        driver.cut(self.world, decode, is_cut=is_cut)

    @rule(pick=picks)
    def an_old_call_arrives_again(self, pick: int) -> None:
        driver.deliver_again(self.world, pick)

    @rule(where=nodes)
    def transfer_process_dies(self, where: str) -> None:
        self.world.nodes[where].kill_transfer()

    @rule(where=nodes)
    def worker_dies_or_comes_back(self, where: str) -> None:
        driver.end_or_start(self.world, where)

    @invariant()
    def no_block_is_lost_or_in_two_hands(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            try:
                self.world.settle()
            finally:
                self.world.close()


TestHandoff = HandoffMachine.TestCase
TestHandoff.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def test_a_lease_is_renewed_for_every_ticket_however_long_the_writer_was_idle_before() -> None:
    world = HandoffWorld(0, asks_once=False)
    try:
        world.weather = Weather(slow_s=2.5)
        for part in range(24):
            world.run_for(2.0 + 0.19 * part)
            driver.submit(world, driver.PROMPTS[0], "D0", 4, 20_000)
            for _ in range(30):
                world.run_for(0.1)
                world.check()
        world.settle()
        assert world.commits == 24
    finally:
        world.close()


@pytest.mark.parametrize("asks_once", [False, True])
def test_blocks_that_are_being_read_stay_whenever_the_budget_ends(asks_once: bool) -> None:
    """The first token may come between the end of a request and its fence."""
    world = HandoffWorld(0, asks_once=asks_once)
    try:
        world.weather = Weather(slow_s=0.1)
        for remaining_ms in range(1, 160):
            driver.submit(world, [*driver.PROMPTS[4], remaining_ms], "D0", 4, remaining_ms)
            for _ in range(30):
                world.run_for(0.01)
                world.check()
        world.settle()
    finally:
        world.close()


def test_random_lives_end_well_and_walk_every_arrow_on_both_sides() -> None:
    """The same events, drawn so that requests get further."""
    commits, arrows = 0, set[tuple[str, str]]()
    for seed in range(60):
        try:
            more, walked = driver.live(seed)
        except AssertionError as exc:
            raise AssertionError(f"seed {seed}: {exc}") from exc
        commits += more
        arrows |= walked
    assert commits > 60
    sides, pulls = ("writer", "reader"), ("granted", "committed", "revoked", "freed")
    assert arrows >= {(side, arrow) for side in sides for arrow in ARROWS.values()}
    assert arrows >= {(side, f"pull_{arrow}") for side in sides for arrow in pulls}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(8))
def test_many_random_lives_end_well(part: int) -> None:
    for seed in range(1000 + part * 500, 1500 + part * 500):
        try:
            driver.live(seed)
        except AssertionError as exc:
            raise AssertionError(f"seed {seed}: {exc}") from exc


class LongHandoffMachine(HandoffMachine):
    """The same for the slow run."""


TestHandoffForLong = pytest.mark.slow(LongHandoffMachine.TestCase)
TestHandoffForLong.settings = settings(max_examples=500, stateful_step_count=60, deadline=None)
