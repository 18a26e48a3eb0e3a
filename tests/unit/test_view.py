"""The cluster view: block sets fed by an index, workers that do not fit together, states, and what the policy sees."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.blocks import block_names
from kvstore.errors import IndexUnavailable
from kvstore.index.base import Snapshot, SnapshotRefused, Tier, WorkerRecord
from kvstore.index.memory import MemoryIndex
from services.protocol.errors import ErrorCode
from services.protocol.proto import worker_pb2
from services.router.compat import Member, difference, kind_of, refusals
from services.router.feed import RECHECK_S, Feed
from services.router.member import Progress, WorkerState
from services.router.residency import SPECULATIVE_S, Residency
from services.router.view import View
from services.telemetry.metrics import RouterMetrics
from tests.fake_worker import fingerprint

untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A busy machine is no failure."""

NAMES = block_names(list(range(160)), 16, bytes(16))
OTHER = block_names(list(range(500, 660)), 16, bytes(16))


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def view(clock: Clock) -> View:
    return View("model-a", "tokenizer-a", 5.0, clock)


def registration(worker_id: str, role: str = "prefill", **changed: Any) -> worker_pb2.Registration:
    values: dict[str, Any] = {
        "worker_id": worker_id,
        "role": role,
        "epoch": "e1",
        "fingerprint": fingerprint(),
        "num_blocks": 100,
        "transport": "tcp",
        "address": f"{worker_id}:1",
    }
    return worker_pb2.Registration(**(values | changed))


def join(view: View, worker_id: str, role: str = "prefill", **changed: Any) -> None:
    view.registered(registration(worker_id, role, **changed), f"{worker_id}:1")
    view.link_is(worker_id, WorkerState.READY)


def states(view: View) -> dict[str, str]:
    return {e.worker_id: str(e.state) for e in view.entries()}


def depth(view: View, worker_id: str, names: list[bytes] = NAMES) -> int:
    return next(w.cached_blocks for w in view.candidates(names) if w.worker_id == worker_id)


class Store:
    """A feed over a MemoryIndex with one worker that publishes."""

    def __init__(self, view: View, clock: Clock, max_batches: int = 1000) -> None:
        self.index = MemoryIndex(ttl_s=1e9, max_batches=max_batches)
        self.metrics = RouterMetrics()
        self.feed = Feed(self.index, view, self.metrics, clock)

    async def announce(self, worker_id: str = "p0", epoch: str = "e1") -> None:
        await self.index.announce(WorkerRecord(worker_id, epoch, b""), b"")

    async def publish(self, stored: list[bytes], removed: list[bytes] | None = None, epoch: str = "e1") -> None:
        await self.index.publish("p0", epoch, stored, removed or [])

    def repaired(self) -> float:
        return self.metrics.registry.get_sample_value("pdray_view_gaps_repaired_total") or 0.0


# --- block sets ---


async def test_events_raise_and_lower_the_depth_of_a_prompt(view: View, clock: Clock) -> None:
    store = Store(view, clock)
    join(view, "p0")
    await store.announce()
    await store.publish(NAMES[:4])
    await store.feed.step()
    assert depth(view, "p0") == 4
    await store.publish(NAMES[4:7])
    await store.feed.step()
    assert depth(view, "p0") == 7
    await store.publish([], NAMES[2:7])
    await store.feed.step()
    assert depth(view, "p0") == 2
    await store.index.clear("p0", "e1")
    await store.feed.step()
    assert depth(view, "p0") == 0
    assert store.repaired() == 0


async def test_a_gap_in_the_numbers_is_repaired_by_a_snapshot_and_counted(view: View, clock: Clock) -> None:
    store = Store(view, clock, max_batches=2)
    join(view, "p0")
    await store.announce()
    await store.publish(NAMES[:1])
    await store.feed.step()
    for i in range(1, 8):  # more batches than the stream keeps
        await store.publish(NAMES[i : i + 1])
    await store.feed.step()
    await store.feed.step()
    assert depth(view, "p0") == 8
    assert store.repaired() == 1
    await store.publish(NAMES[8:9])
    await store.feed.step()
    assert depth(view, "p0") == 9
    assert store.repaired() == 1


async def test_a_new_epoch_starts_with_nothing_of_the_old_one(view: View, clock: Clock) -> None:
    store = Store(view, clock)
    join(view, "p0")
    await store.announce()
    await store.publish(NAMES)
    await store.feed.step()
    assert depth(view, "p0") == 10
    join(view, "p0", epoch="e2")
    assert depth(view, "p0") == 0
    await store.announce(epoch="e2")
    await store.publish(OTHER[:3], epoch="e2")
    await store.feed.step()
    assert (depth(view, "p0"), depth(view, "p0", OTHER)) == (0, 3)


async def test_a_stream_that_started_over_unnoticed_heals_by_the_regular_check(view: View, clock: Clock) -> None:
    store = Store(view, clock)
    join(view, "p0")
    await store.announce()
    for i in range(5):
        await store.publish(NAMES[i : i + 1])
    await store.feed.step()
    await store.index.withdraw("p0", "e1")  # the store lost its data; the worker published again
    await store.announce()
    await store.publish(OTHER[:2])
    await store.feed.step()
    assert depth(view, "p0") == 5  # not yet known
    clock.now_s += RECHECK_S + 1
    await store.feed.step()
    assert (depth(view, "p0"), depth(view, "p0", OTHER)) == (0, 2)
    assert store.repaired() == 1


async def test_what_an_unreachable_index_said_last_stays_until_it_is_back(view: View, clock: Clock) -> None:
    class Flaky(MemoryIndex):
        up = True

        async def read(self, cursors: Any, wait_s: float) -> Any:
            if not self.up:
                raise IndexUnavailable("gone")
            return await super().read(cursors, wait_s)

    store = Store(view, clock)
    store.index = index = Flaky(ttl_s=1e9)
    store.feed = Feed(index, view, store.metrics, clock)
    join(view, "p0")
    await store.announce()
    await store.publish(NAMES[:6])
    await store.feed.step()
    index.up = False
    with pytest.raises(IndexUnavailable):
        await store.feed.step()
    assert depth(view, "p0") == 6


async def test_beyond_the_bound_the_worker_chosen_longest_ago_is_forgotten_until_there_is_room(
    view: View, clock: Clock
) -> None:
    store = Store(view, clock)
    store.feed = Feed(store.index, view, store.metrics, clock, max_blocks=12)
    for worker_id, names in (("p0", NAMES), ("p1", OTHER)):
        join(view, worker_id)
        await store.announce(worker_id)
        await store.index.publish(worker_id, "e1", names[:8], [])
    view.routed({"p1"}, OTHER[:1])
    await store.feed.step()
    clock.now_s += SPECULATIVE_S + 0.1
    assert (depth(view, "p0"), depth(view, "p1", OTHER)) == (0, 8)
    sample = store.metrics.registry.get_sample_value
    assert (sample("pdray_view_blocks"), sample("pdray_view_forgotten_blocks_total")) == (8, 8)
    await store.publish(NAMES[8:])
    await store.feed.step()
    clock.now_s += RECHECK_S + 1
    await store.feed.step()
    assert depth(view, "p0") == 0
    await store.index.clear("p1", "e1")
    await store.feed.step()
    await store.feed.step()
    assert (depth(view, "p0"), depth(view, "p1", OTHER)) == (10, 0)


async def test_a_set_that_cannot_be_read_costs_the_hits_of_its_own_worker_only(view: View, clock: Clock) -> None:
    class Refusing(MemoryIndex):
        async def snapshot(self, worker_id: str, epoch: str) -> Snapshot:
            if worker_id == "p0":
                raise SnapshotRefused("too large")
            return await super().snapshot(worker_id, epoch)

    store = Store(view, clock)
    index = Refusing(ttl_s=1e9)
    feed = Feed(index, view, store.metrics, clock)
    for worker_id in ("p0", "p1"):
        join(view, worker_id)
        await index.publish(worker_id, "e1", NAMES, [])
    await feed.step()
    await feed.step()
    assert (depth(view, "p0"), depth(view, "p1")) == (0, 10)
    assert store.metrics.registry.get_sample_value("pdray_index_ignored_total") == 1


async def test_the_policy_sees_what_lower_tiers_could_load(view: View, clock: Clock) -> None:
    store = Store(view, clock)
    join(view, "p0")
    await store.announce()
    await store.publish(NAMES[:2])
    await store.index.publish("p0", "e1", NAMES[:7], [], tier=Tier.HOST)
    await store.feed.step()
    (worker,) = view.candidates(NAMES)
    assert (worker.cached_blocks, worker.tier_blocks) == (2, {"host": 7})
    await store.index.publish("p0", "e1", [], NAMES[4:7], tier=Tier.HOST)
    await store.feed.step()
    assert view.candidates(NAMES)[0].tier_blocks == {"host": 4}
    assert view.candidates(NAMES[:2])[0].tier_blocks == {}


async def test_only_attached_workers_are_read(view: View, clock: Clock) -> None:
    store = Store(view, clock)
    join(view, "p0")
    view.link_is("p0", WorkerState.LOST, "gone")
    await store.announce()
    await store.publish(NAMES)
    await store.feed.step()
    assert view.residencies() == {}
    assert view.candidates(NAMES) == ()


def test_a_prompt_just_routed_counts_as_cached_until_its_events_come_or_the_time_is_over(
    view: View, clock: Clock
) -> None:
    join(view, "p0")
    view.routed({"p0"}, NAMES)
    assert depth(view, "p0") == 10
    assert depth(view, "p0", [*NAMES[:4], *OTHER]) == 4
    clock.now_s += SPECULATIVE_S + 0.1
    assert depth(view, "p0") == 0


def test_events_take_the_place_of_expectations(clock: Clock) -> None:
    residency = Residency(1000)
    residency.reset(0, [])
    residency.expect(NAMES, clock.now_s)
    assert residency.apply(1, NAMES[:3], [])
    clock.now_s += SPECULATIVE_S + 0.1
    assert residency.depth(NAMES, clock.now_s) == 3


def test_a_longer_prompt_is_expected_beyond_what_is_stored(clock: Clock) -> None:
    residency = Residency(1000)
    residency.reset(1, NAMES[:3])
    residency.expect(NAMES, clock.now_s)
    assert residency.depth(NAMES, clock.now_s) == 10


def test_too_many_expectations_are_forgotten_from_the_end_of_the_oldest_prompt(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.router.residency.MAX_SPECULATIVE", 12)
    residency = Residency(1000)
    residency.reset(0, [])
    residency.expect(NAMES, clock.now_s)
    residency.expect(OTHER[:5], clock.now_s)
    residency.expect(OTHER[:1], clock.now_s)
    assert residency.depth(NAMES, clock.now_s) == 7


@untimed
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 8), st.integers(0, 6), st.booleans()), min_size=1, max_size=40)
)
def test_depth_by_bisection_equals_a_scan_and_expectations_stay_prefix_closed(
    steps: list[tuple[int, int, int, bool]],
) -> None:
    chains = [block_names([i] * 16 * 8, 16, bytes(16)) for i in range(3)]
    chains.append([*chains[0][:4], *block_names([9] * 16 * 4, 16, bytes(16))])  # shares four blocks with chain 0
    residency, now, held, seq = Residency(1000), 0.0, set[bytes](), 0
    expected: dict[bytes, float] = {}
    residency.reset(0, [])
    for chain, length, wait, is_event in steps:
        now += wait
        if is_event:
            seq += 1
            stored = chains[chain][:length]
            held.update(stored)
            for name in stored:
                expected.pop(name, None)
            assert residency.apply(seq, stored, [])
        else:
            residency.expect(chains[chain][:length], now)
            expected |= {name: now + SPECULATIVE_S for name in chains[chain][:length] if name not in held}
        for names in chains:
            there = [n in held or expected.get(n, 0.0) > now for n in names]
            assert sorted(there, reverse=True) == there
            assert residency.depth(names, now) == sum(there)


def test_more_names_than_a_worker_can_hold_ask_for_a_snapshot() -> None:
    residency = Residency(4)
    residency.reset(0, [])
    assert not residency.apply(1, NAMES, [])
    residency.reset(2, NAMES)
    assert len(residency) == 0


# --- who fits whom ---


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"block_size": 32}, ["block_size", "16", "32"]),
        ({"dtype": "bfloat16"}, ["dtype", "float32", "bfloat16"]),
        ({"layout_version": 2}, ["layout_version", "1", "2"]),
    ],
)
def test_the_second_kind_to_register_is_refused_with_both_values(
    view: View, changed: dict[str, Any], named: list[str]
) -> None:
    join(view, "p0", "prefill")
    join(view, "d0", "decode", fingerprint=fingerprint(**changed))
    assert states(view) == {"p0": "ready", "d0": "refused"}
    ready, reason = view.readiness()
    assert not ready
    for text in [*named, "p0", "d0"]:
        assert text in reason
    error = view.no_pair()
    assert error is not None
    assert error.code is ErrorCode.INCOMPATIBLE_WORKERS


def test_a_geometry_that_differs_names_the_group_and_the_field() -> None:
    theirs = fingerprint()
    theirs.geometry_json = theirs.geometry_json.replace('"num_kv_heads": 2', '"num_kv_heads": 3')
    assert difference(kind_of(fingerprint()), kind_of(theirs), "p0", "d0") == (
        "kv group 0: num_kv_heads differs: 2 on p0, 3 on d0"
    )


def test_pools_of_unequal_size_fit_together(view: View) -> None:
    larger = fingerprint()
    larger.geometry_json = larger.geometry_json.replace('"num_blocks": [512]', '"num_blocks": [9]')
    join(view, "p0")
    join(view, "d0", "decode", fingerprint=larger)
    assert view.readiness() == (True, "")


def test_a_worker_of_another_model_than_the_routers_is_refused_even_as_the_first(view: View) -> None:
    join(view, "p0", fingerprint=fingerprint(tokenizer="tokenizer-b"))
    join(view, "p1")
    join(view, "d0", "decode")
    assert states(view) == {"p0": "refused", "p1": "ready", "d0": "ready"}
    assert "tokenizer-b" in view.entries()[1].reason


def test_unequal_transports_make_no_pair_but_a_mixed_worker_needs_none(view: View) -> None:
    join(view, "m0", "mixed", transport="local")
    join(view, "p0", transport="tcp")
    join(view, "d0", "decode", transport="mooncake")
    assert states(view) == {"m0": "ready", "p0": "ready", "d0": "refused"}
    assert "tcp on p0" in view.entries()[0].reason


def test_the_refused_kind_takes_over_when_the_last_of_the_first_kind_has_gone(view: View) -> None:
    other = fingerprint(block_size=32)
    join(view, "p0")
    join(view, "p1", fingerprint=other)
    join(view, "d1", "decode", fingerprint=other)
    assert states(view) == {"p0": "ready", "p1": "refused", "d1": "refused"}
    view.link_is("p0", WorkerState.CONNECTING)  # within its grace it still counts
    assert states(view)["p1"] == "refused"
    view.link_is("p0", WorkerState.LOST, "gone")
    assert states(view) == {"p0": "lost", "p1": "ready", "d1": "ready"}
    view.link_is("p0", WorkerState.READY)
    assert states(view)["p0"] == "ready"  # it registered before the others did


def test_a_restart_as_another_kind_does_not_evict_the_others(view: View) -> None:
    join(view, "p0")
    join(view, "d0", "decode")
    join(view, "p0", epoch="e2", fingerprint=fingerprint(block_size=32))
    assert states(view) == {"p0": "refused", "d0": "ready"}


@pytest.mark.parametrize(
    "geometry", ["", "{}", "[]", '{"groups": 3, "num_blocks": [1]}', '{"groups": [], "num_blocks": []}']
)
def test_a_fingerprint_that_cannot_be_read_is_refused(view: View, geometry: str) -> None:
    bad = fingerprint()
    bad.geometry_json = geometry
    join(view, "p0", fingerprint=bad)
    join(view, "d0", "decode")
    assert states(view)["p0"] == "refused"
    assert "geometry" in view.entries()[1].reason


def test_an_unknown_role_is_refused(view: View) -> None:
    join(view, "x0", "encode")
    assert "encode" in view.entries()[0].reason


@untimed
@given(st.lists(st.sampled_from([16, 32, 64]), min_size=1, max_size=8))
def test_those_that_are_not_refused_are_all_of_the_first_kind(sizes: list[int]) -> None:
    members = [Member(f"w{i}", kind_of(fingerprint(block_size=s))) for i, s in enumerate(sizes)]
    refused = refusals(members)
    assert {m.worker_id for m in members if m.kind.block_size != sizes[0]} == set(refused)


def test_prompts_under_unequal_salts_models_or_sizes_share_no_block() -> None:
    kind = kind_of(fingerprint())
    roots = {kind.root(""), kind.root("a"), dataclasses.replace(kind, model="b").root("")}
    roots |= {dataclasses.replace(kind, block_size=32).root(""), dataclasses.replace(kind, dtype="x").root("")}
    assert len(roots) == 5


# --- states and loads ---


def test_a_draining_worker_gets_nothing_new(view: View) -> None:
    join(view, "p0")
    join(view, "d0", "decode")
    view.registered(registration("p0", draining=True), "p0:1")
    assert states(view)["p0"] == "draining"
    assert [w.worker_id for w in view.candidates(())] == ["d0"]


def test_running_sequences_without_steps_are_a_stall_until_the_counter_moves(view: View, clock: Clock) -> None:
    join(view, "d0", "decode")
    view.loaded("d0", worker_pb2.Load(step=7, running=2))
    clock.now_s += 4.9
    view.loaded("d0", worker_pb2.Load(step=7, running=2))
    assert states(view)["d0"] == "ready"
    clock.now_s += 0.2
    view.loaded("d0", worker_pb2.Load(step=7, running=2))
    assert states(view)["d0"] == "stalled"
    view.loaded("d0", worker_pb2.Load(step=8, running=2))
    assert states(view)["d0"] == "ready"


def test_an_idle_worker_never_stalls_and_a_slow_one_gets_three_steps(view: View, clock: Clock) -> None:
    join(view, "d0", "decode")
    view.loaded("d0", worker_pb2.Load(step=7))
    clock.now_s += 600
    view.loaded("d0", worker_pb2.Load(step=7, running=1, step_ms=4000))
    assert states(view)["d0"] == "ready"
    clock.now_s += 11.9
    view.loaded("d0", worker_pb2.Load(step=7, running=1, step_ms=4000))
    assert states(view)["d0"] == "ready"
    clock.now_s += 0.2
    view.loaded("d0", worker_pb2.Load(step=7, running=1, step_ms=4000))
    assert states(view)["d0"] == "stalled"


def test_a_prefill_worker_that_holds_kv_for_a_full_reader_is_not_stalled_unless_it_says_so(
    view: View, clock: Clock
) -> None:
    join(view, "p0")
    view.loaded("p0", worker_pb2.Load(step=7, running=2))
    clock.now_s += 60
    view.loaded("p0", worker_pb2.Load(step=7, running=2))
    assert states(view)["p0"] == "ready"
    view.loaded("p0", worker_pb2.Load(step=7, running=2, stalled=True))
    assert states(view)["p0"] == "stalled"


def test_rates_that_make_no_sense_are_not_used(view: View) -> None:
    for i, rate in enumerate((float("nan"), float("inf"), -5.0, 0.0, 300.0)):
        join(view, f"p{i}")
        view.loaded(f"p{i}", worker_pb2.Load(prefill_tokens_per_s=rate))
    assert {w.prefill_tokens_per_s for w in view.candidates(())} == {300.0}


def computing(view: View, worker_id: str, rate: float, loads: int, step_tokens: int = 100) -> None:
    """So many loads of a worker that computes at this rate."""
    join(view, worker_id)
    for i in range(loads):
        view.loaded(worker_id, worker_pb2.Load(prefill_tokens_per_s=rate, prompt_tokens_computed=step_tokens * i))


def test_a_worker_counts_as_fast_as_the_others_until_it_is_plain_that_it_is_not(view: View) -> None:
    for worker_id, rate in (("p0", 1000.0), ("p1", 600.0)):  # p1 has had a long prompt, or it is slow
        computing(view, worker_id, rate, loads=20)
    assert [w.prefill_tokens_per_s for w in view.candidates(())] == [pytest.approx(800)] * 2
    for worker_id, rate in (("p2", 1000.0), ("p3", 600.0)):
        computing(view, worker_id, rate, loads=2000)
    assert [w.prefill_tokens_per_s for w in view.candidates(())][2:] == [pytest.approx(1000), pytest.approx(600)]


def test_speed_is_the_mean_of_many_prompts_by_the_time_they_took(view: View) -> None:
    join(view, "p0")
    computed = 0
    for rate, tokens in ((1000.0, 1), (1000.0, 500), (250.0, 500), (0.0, 500), (float("nan"), 500)):
        computed += tokens
        view.loaded("p0", worker_pb2.Load(prefill_tokens_per_s=rate, prompt_tokens_computed=computed))
    assert view.candidates(())[0].prefill_tokens_per_s == pytest.approx(1000 / 2.5, rel=0.01)


def test_the_share_of_a_pool_that_holds_something_counts_cached_blocks_as_well(view: View) -> None:
    join(view, "p0")
    assert view.candidates(())[0].full_share == 0.0
    view.loaded("p0", worker_pb2.Load(blocks_total=100, blocks_free=25, blocks_cached=60, blocks_used=15))
    assert view.candidates(())[0].full_share == 0.75


@pytest.mark.parametrize(
    ("role", "rate", "stalled"), [("decode", 0, True), ("decode", 200, False), ("mixed", 200, False)]
)
def test_who_computes_chunks_may_take_a_whole_one_before_it_counts_as_stalled(
    role: str, rate: float, stalled: bool
) -> None:
    """A decode worker does so after a preemption, and as a fallback."""
    progress = Progress(moved_s=0.0, limit_s=5.0)
    load = worker_pb2.Load(step=1, running=1, step_ms=50, prefill_tokens_per_s=rate)  # 2.6 s for a chunk at 200
    progress.observe(load, role, 0.0)
    progress.observe(load, role, 7.0)
    assert progress.is_stalled is stalled
    progress.observe(load, role, 8.0)
    assert progress.is_stalled
