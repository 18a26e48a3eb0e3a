"""Policies against oracles that sort everything, and what each promises under loads made to break it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest

from kvstore.blocks import block_names, namespace_root
from kvstore.pool import BlockPool
from services.engine.intake import Limits
from services.engine.messages import AddSequence, ReserveSequence, Sampling, StartSequence
from services.engine.policies import POLICIES
from services.engine.scheduler import Scheduler, Step
from services.engine.sequence import Sequence
from services.engine_config import EngineConfig

SIZE = 4
ROOT = namespace_root(salt="", model="m", tokenizer="t", dtype="f", block_size=SIZE, layout_version=1)


class Families:
    """Counts of all prefixes in dicts: who waits with it, and how many came since nobody did."""

    def __init__(self) -> None:
        self.waiting: dict[tuple[bytes, ...], set[str]] = {}
        self.came: Counter[tuple[bytes, ...]] = Counter()
        self.first: dict[tuple[bytes, ...], int] = {}  # arrival of who came first
        self.known: dict[str, list[bytes]] = {}

    def sync(self, body: list[Sequence]) -> None:
        """Call after each event, so that no family empties and fills between two calls."""
        now = {s.seq_id: s.names for s in body}
        arrival = {s.seq_id: s.arrival for s in body}
        for seq_id in sorted(now.keys() - self.known.keys(), key=lambda s: arrival[s]):
            for depth in range(1, len(now[seq_id]) + 1):
                prefix = tuple(now[seq_id][:depth])
                self.waiting.setdefault(prefix, set()).add(seq_id)
                self.came[prefix] += 1
                self.first.setdefault(prefix, arrival[seq_id])
        for seq_id in self.known.keys() - now.keys():
            for depth in range(1, len(self.known[seq_id]) + 1):
                prefix = tuple(self.known[seq_id][:depth])
                self.waiting[prefix].remove(seq_id)
                if not self.waiting[prefix]:
                    del self.waiting[prefix], self.came[prefix], self.first[prefix]
        self.known = {k: list(v) for k, v in now.items()}

    def order(self, members: list[Sequence], depth: int = 0) -> list[Sequence]:
        """Whoever ends here, then each group that shares the next name, the one to which most came first."""
        here = [s for s in members if len(s.names) == depth]
        groups: dict[tuple[bytes, ...], list[Sequence]] = {}
        for seq in members:
            if len(seq.names) > depth:
                groups.setdefault(tuple(seq.names[: depth + 1]), []).append(seq)
        ranked = sorted(groups, key=lambda g: (-self.came[g], self.first[g]))
        return sorted(here, key=lambda s: s.arrival) + [s for g in ranked for s in self.order(groups[g], depth + 1)]


@dataclass
class Rig:
    """A scheduler under one policy; every sampled token is 7 and the books are checked after every step."""

    policy: str
    num_blocks: int = 64
    budget: int = 32
    max_seqs: int = 4
    ageing_bound: int = 1_000_000
    max_model_len: int = 4096
    more: dict[str, object] = field(default_factory=dict)
    started: list[str] = field(default_factory=list)
    outputs: Counter[str] = field(default_factory=Counter)
    families: Families = field(default_factory=Families)
    grown: int = 0  # blocks that running sequences were given beyond those they were placed with

    def __post_init__(self) -> None:
        limits = Limits(self.num_blocks, SIZE, self.max_model_len, vocab_size=100_000)
        rules = EngineConfig(policy=self.policy, ageing_bound_tokens=self.ageing_bound, **self.more)  # type: ignore[arg-type]
        self.scheduler = Scheduler(
            BlockPool(self.num_blocks),
            limits,
            max_num_batched_tokens=self.budget,
            max_num_seqs=self.max_seqs,
            rules=rules,
        )

    def add(self, seq_id: str, prompt: Iterable[int], max_tokens: int = 4, priority: int = 0) -> None:
        ids = tuple(prompt)
        self.scheduler.add(
            AddSequence(
                seq_id=seq_id,
                prompt_ids=ids,
                sampling=Sampling(max_tokens=max_tokens),
                root=ROOT,
                block_names=tuple(block_names(ids, SIZE, ROOT)),
                priority=priority,
            )
        )

    def step(self) -> Step:
        before = {s.seq_id: len(s.block_ids) for s in self.scheduler.roster.running.values()}
        step = self.scheduler.schedule()
        running = self.scheduler.roster.running.items()
        self.grown += sum(len(s.block_ids) - before[k] for k, s in running if len(s.block_ids) > before.get(k, 10**9))
        assert sum(w.count for w in step.work) <= self.budget
        assert len(step.work) <= self.max_seqs
        self.started += [s.seq_id for s in step.started]
        tokens = {key: 7 for w in step.work for key, _ in w.draws}
        for output in self.scheduler.complete(step, tokens, {}):
            self.outputs[output.seq_id] += len(output.token_ids)
        self.scheduler.roster.check()
        return step

    def run(self, limit: int = 20_000) -> None:
        for _ in range(limit):
            if not self.scheduler.roster.sequences:
                return
            self.step()
        raise AssertionError(f"{self.policy}: the load does not end")

    @property
    def clock(self) -> int:
        return self.scheduler.roster.clock

    def queued(self) -> list[Sequence]:
        return self.scheduler.roster.queue.first(10**6, self.clock)


def numbers(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(10, 100_000) for _ in range(count)]


# -- order, against oracles ------------------------------------------------------------------------------------------


def cached_tokens(rig: Rig, seq: Sequence) -> int:
    """By looking at each block's name in turn."""
    pool, count = rig.scheduler.roster.pool, 0
    for name in seq.names[: (seq.num_tokens - 1) // SIZE]:
        if pool._tree.find(name) is None:
            break
        count += SIZE
    return count


def by_lpm(rig: Rig, body: list[Sequence]) -> list[Sequence]:
    if len(body) > 16:
        return sorted(body, key=lambda s: s.arrival)
    return sorted(body, key=lambda s: (-cached_tokens(rig, s), s.arrival))


def by_hrrn(rig: Rig, body: list[Sequence]) -> list[Sequence]:
    def ratio(seq: Sequence) -> float:
        return (rig.clock - seq.waits_since) / max(1, seq.num_tokens - cached_tokens(rig, seq))

    return sorted(body, key=lambda s: (-ratio(s), s.arrival))


ORACLES: dict[str, Callable[[Rig, list[Sequence]], list[Sequence]]] = {
    "fcfs": lambda rig, body: sorted(body, key=lambda s: s.arrival),
    "priority": lambda rig, body: sorted(body, key=lambda s: (s.priority, s.arrival)),
    "lpm": by_lpm,
    "dfs-weight": lambda rig, body: rig.families.order(body),
    "lof": lambda rig, body: sorted(body, key=lambda s: (-s.sampling.max_tokens, s.arrival)),
    "hrrn": by_hrrn,
}


def is_aged(rig: Rig, seq: Sequence) -> bool:
    return seq.is_aged or rig.clock - seq.waits_since >= rig.ageing_bound  # aged once, aged for good


def body_of(rig: Rig) -> list[Sequence]:
    """Those whose place is the policy's to say."""
    ranks_placed = rig.policy in ("fcfs", "priority")
    return [s for s in rig.scheduler.roster.queue if not s.is_aged and (ranks_placed or not s.was_placed)]


def expected_order(rig: Rig) -> list[str]:
    """Aged ones as they came, then (but for fcfs and priority) preempted ones, then the policy's order."""
    aged = [s for s in rig.scheduler.roster.queue if is_aged(rig, s)]
    body = [s for s in body_of(rig) if s not in aged]
    placed = [s for s in rig.scheduler.roster.queue if s not in aged and s not in body]
    front = [*sorted(aged, key=lambda s: s.arrival), *sorted(placed, key=lambda s: s.arrival)]
    return [s.seq_id for s in front + ORACLES[rig.policy](rig, body)]


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("seed", range(4))
def test_the_queue_is_in_the_order_of_an_oracle_that_sorts_it_whole(policy: str, seed: int) -> None:
    rng = random.Random(seed)
    rig = Rig(policy, num_blocks=40, ageing_bound=rng.choice([300, 10**6]), more={"lpm_queue_bound": 16})
    families = [numbers(rng, 40) for _ in range(3)]
    for number in range(120):
        for nth in range(rng.choice([0, 0, 1, 2]) if number < 100 else 0):
            shared = rng.choice(families)[: rng.choice([0, 8, 10, 20, 40])]
            rig.add(
                f"{number}-{nth}", shared + numbers(rng, rng.randint(1, 12)), rng.randint(1, 30), rng.choice([0, 0, 1])
            )
            rig.families.sync(body_of(rig))
        if rng.random() < 0.1 and rig.scheduler.roster.queue:
            rig.scheduler.abort(rng.choice(list(rig.scheduler.roster.queue)).seq_id)
            rig.families.sync(body_of(rig))
        expected_aged = {s.seq_id for s in rig.scheduler.roster.queue if is_aged(rig, s)}
        rig.scheduler.roster.age()
        rig.families.sync(body_of(rig))
        assert {s.seq_id for s in rig.scheduler.roster.queue if s.is_aged} == expected_aged
        expected = expected_order(rig)
        assert [s.seq_id for s in rig.queued()] == expected, f"{policy}, seed {seed}, step {number}"
        rig.step()
        rig.families.sync(body_of(rig))
    rig.run()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_first_few_are_those_of_the_whole_order(policy: str) -> None:
    rng = random.Random(5)
    rig = Rig(policy, max_seqs=1)
    for i in range(60):
        rig.add(str(i), numbers(rng, rng.choice([3, 9, 20])), rng.randint(1, 9), rng.choice([0, 1]))
    whole = rig.queued()
    for count in (1, 7, 32):
        assert rig.scheduler.roster.queue.first(count, rig.clock) == whole[:count]


def test_priority_with_equal_values_is_first_come_first_served() -> None:
    started = []
    for policy in ("fcfs", "priority"):
        rng = random.Random(3)
        rig = Rig(policy, num_blocks=30)
        for i in range(40):
            rig.add(str(i), numbers(rng, rng.randint(1, 30)), rng.randint(1, 20))
        rig.run()
        started.append(rig.started)
    assert started[0] == started[1]


def test_fcfs_ignores_priorities() -> None:
    rig = Rig("fcfs", max_seqs=1)
    for i, priority in enumerate([2, 1, 0]):
        rig.add(str(i), [10 * i + 10], priority=priority)
    rig.run()
    assert rig.started == ["0", "1", "2"]


# -- waiting is bounded ----------------------------------------------------------------------------------------------


def tokens_until_started(rig: Rig, victim: Callable[[], None], others: Callable[[int], None]) -> int:
    """Computed tokens between the victim's arrival and its start, while the others keep coming."""
    for number in range(5_000):
        if number == 20:
            victim()
            came = rig.clock
        others(number)
        rig.step()
        if "victim" in rig.started:
            return rig.clock - came
    raise AssertionError(f"{rig.policy}: the victim never started")


def longest_drain(rig: Rig, tokens_of_request: int) -> int:
    """Tokens until all that may run when a sequence becomes first have ended, and one step more."""
    return rig.max_seqs * tokens_of_request + rig.budget


BOUND = 2_000


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("seed", range(3))
def test_the_wait_is_bounded_while_short_prompts_keep_coming(policy: str, seed: int) -> None:
    """Nine of ten requests are short, share a cached prefix and would all go before the long one."""
    rng = random.Random(seed)
    rig = Rig(policy, num_blocks=100, ageing_bound=BOUND)
    shared = numbers(rng, 16)
    count = 0

    def others(number: int) -> None:
        nonlocal count
        while len(rig.scheduler.roster.queue) < 12:
            count += 1
            is_long = count % 10 == 0
            prompt = numbers(rng, 40) if is_long else [*shared, *numbers(rng, rng.randint(1, 4))]
            rig.add(f"s{count}", prompt, rng.randint(20, 40) if not is_long else 1)

    waited = tokens_until_started(rig, lambda: rig.add("victim", numbers(rng, 300), 2), others)
    # those that aged before it, in their order: at most as many as wait at once
    assert waited <= BOUND + 13 * (40 + 40) + longest_drain(rig, 40 + 40), f"{policy}, seed {seed}: {waited}"


@pytest.mark.parametrize("seed", range(3))
def test_the_wait_is_bounded_while_urgent_requests_keep_coming(seed: int) -> None:
    rng = random.Random(seed)
    rig = Rig("priority", num_blocks=60, ageing_bound=BOUND)
    count = 0

    def others(number: int) -> None:
        nonlocal count
        while len(rig.scheduler.roster.queue) < 8:
            count += 1
            rig.add(f"s{count}", numbers(rng, rng.randint(4, 20)), 20, priority=-1)

    waited = tokens_until_started(rig, lambda: rig.add("victim", numbers(rng, 100), 40, priority=5), others)
    assert BOUND <= waited <= BOUND + 9 * 40 + longest_drain(rig, 40), f"seed {seed}: {waited}"
    preemptions = rig.scheduler.roster.preemptions
    while "victim" in rig.scheduler.roster.sequences:  # it is not stopped again
        assert rig.scheduler.roster.sequences["victim"].block_ids
        others(0)
        rig.step()
    assert preemptions <= rig.scheduler.roster.preemptions


@pytest.mark.parametrize("seed", range(3))
def test_the_wait_is_bounded_while_long_answers_keep_coming(seed: int) -> None:
    rng = random.Random(seed)
    rig = Rig("lof", ageing_bound=BOUND)
    count = 0

    def others(number: int) -> None:
        nonlocal count
        while len(rig.scheduler.roster.queue) < 8:
            count += 1
            rig.add(f"s{count}", numbers(rng, 4), rng.randint(20, 60))

    waited = tokens_until_started(rig, lambda: rig.add("victim", numbers(rng, 4), 1), others)
    assert BOUND <= waited <= BOUND + 9 * 64 + longest_drain(rig, 64), f"seed {seed}: {waited}"


def test_a_placed_prompt_that_urgent_ones_keep_from_its_turn_gets_it_after_the_ageing_bound() -> None:
    rng = random.Random(1)
    rig = Rig("priority", num_blocks=400, budget=16, max_seqs=4, ageing_bound=BOUND)
    rig.add("victim", numbers(rng, 200), 2, priority=5)
    rig.step()
    for number in range(2_000):
        while len(rig.scheduler.roster.queue) < 2:
            rig.add(f"s{number}-{len(rig.scheduler.roster.sequences)}", numbers(rng, 64), 1, priority=0)
        rig.step()
        if rig.outputs["victim"]:
            assert rig.clock <= BOUND + 3 * 200 + longest_drain(rig, 65)
            return
    raise AssertionError("the victim gave no token")


# -- preemption ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("seed", range(8))
def test_preemptions_of_a_finite_load_are_bounded(policy: str, seed: int) -> None:
    rng = random.Random(seed)
    rig = Rig(policy, num_blocks=rng.randint(12, 30), max_seqs=rng.randint(2, 6), ageing_bound=rng.choice([100, 10**6]))
    count = 24
    first: set[str] = set()
    for i in range(count):
        rig.add(str(i), numbers(rng, rng.randint(1, 16)), rng.randint(1, 30), rng.choice([0, 0, 1, 2]))
        if i % 4 == 3:
            rig.step()
    while rig.scheduler.roster.sequences:
        running = rig.scheduler.roster.running.values()
        first = {min(running, key=lambda s: s.order).seq_id} if running else set()
        lowest = min((s.rank for s in rig.scheduler.roster.sequences.values()), default=0)
        rig.step()
        for seq_id in first & rig.scheduler.roster.sequences.keys():
            seq = rig.scheduler.roster.sequences[seq_id]
            claimed = policy == "priority" and seq.rank > lowest
            assert seq.block_ids or claimed, f"{policy}, seed {seed}: {seq_id}, the first in order, was preempted"
    assert rig.scheduler.roster.preemptions <= (rig.grown + 2 * count) * rig.max_seqs, f"{policy}, seed {seed}"
    assert sum(rig.outputs.values()) > 0


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_four_requests_that_grow_to_half_the_pool_each_all_end(policy: str) -> None:
    rig = Rig(policy, num_blocks=24, budget=64)
    rng = random.Random(9)
    for i in range(4):
        rig.add(str(i), numbers(rng, 4 * SIZE), 8 * SIZE + 1)
    rig.run()
    assert rig.outputs == {str(i): 8 * SIZE + 1 for i in range(4)}
    assert 1 <= rig.scheduler.roster.preemptions <= (rig.grown + 4) * 4
    assert rig.scheduler.roster.prompt_tokens_cached == 0


def test_an_urgent_request_preempts_less_urgent_ones_once_and_only_where_that_makes_room() -> None:
    rng = random.Random(2)
    rig = Rig("priority", num_blocks=20, budget=64, max_seqs=8)
    rig.add("low", numbers(rng, 30), 20, priority=2)
    rig.add("mid", numbers(rng, 30), 20, priority=1)
    rig.step()
    rig.add("same", numbers(rng, 30), 4, priority=2)
    rig.step()
    assert rig.scheduler.roster.preemptions == 0  # nobody is less urgent
    rig.add("too-large", numbers(rng, 70), 4, priority=1)
    rig.step()
    assert rig.scheduler.roster.preemptions == 0  # the less urgent one would not make enough room
    rig.scheduler.abort("too-large")
    rig.add("urgent", numbers(rng, 20), 4, priority=0)
    rig.step()
    assert "urgent" in rig.started
    assert not rig.scheduler.roster.sequences["low"].block_ids
    assert rig.scheduler.roster.sequences["mid"].block_ids
    rig.run()


def test_an_urgent_request_takes_a_slot() -> None:
    rig = Rig("priority", max_seqs=2)
    for i in range(2):
        rig.add(f"low-{i}", [10 * i + 10], 30, priority=1)
    rig.step()
    rig.add("urgent", [99], 3)
    rig.step()
    assert rig.started == ["low-0", "low-1", "urgent"]
    assert not rig.scheduler.roster.sequences["low-1"].block_ids
    rig.run()


# -- overload --------------------------------------------------------------------------------------------------------


def test_in_overload_fcfs_starts_all_in_order() -> None:
    rng = random.Random(4)
    rig = Rig("fcfs", num_blocks=1000)
    for i in range(100):
        rig.add(str(i), numbers(rng, rng.choice([2, 50])), rng.randint(1, 20), rng.choice([0, 1, 2]))
    rig.run()
    assert rig.started == [str(i) for i in range(100)]


def test_in_overload_urgent_requests_do_not_wait() -> None:
    rng = random.Random(4)
    rig = Rig("priority", num_blocks=1000)
    for i in range(100):
        rig.add(f"low-{i}", numbers(rng, 20), 20, priority=1)
    for i in range(20):
        rig.step()
        rig.add(f"urgent-{i}", numbers(rng, 20), 2)
        rig.step()
        assert f"urgent-{i}" in rig.started
    rig.run()


def test_a_long_queue_makes_lpm_take_requests_as_they_came() -> None:
    rng = random.Random(4)
    shared = numbers(rng, 20)
    for waiting, hits_first in ((8, True), (9, False)):
        rig = Rig("lpm", max_seqs=1, more={"lpm_queue_bound": 8})
        rig.add("first", [*shared, 11], 1)
        rig.run()
        for i in range(waiting - 1):
            rig.add(f"cold-{i}", numbers(rng, 20))
        rig.add("warm", [*shared, 12])
        rig.step()
        assert (rig.started[-1] == "warm") == hits_first


@pytest.mark.parametrize("better", ["lpm", "dfs-weight"])
def test_who_looks_at_prefixes_computes_fewer_tokens_than_first_come_first_served(better: str) -> None:
    computed = {}
    for policy in ("fcfs", better):
        rng = random.Random(6)
        rig = Rig(policy, num_blocks=48, max_seqs=1, budget=64)
        families = [numbers(rng, 80) for _ in range(4)]
        for i in range(48):
            rig.add(str(i), [*families[i % 4], *numbers(rng, 3)], 1)
        rig.run()
        computed[policy] = rig.clock
    assert computed[better] < computed["fcfs"] / 2


def test_in_overload_families_of_prompts_start_together() -> None:
    rng = random.Random(6)
    rig = Rig("dfs-weight", num_blocks=60, max_seqs=1, budget=64)
    families = {name: numbers(rng, 40) for name in "abc"}
    names = ["a"] * 3 + ["b"] * 6 + ["c"] * 4
    rng.shuffle(names)
    rig.add("now", numbers(rng, 8), 40)
    rig.step()
    for i, name in enumerate(names):
        rig.add(f"{name}{i}", [*families[name], *numbers(rng, 2)], 2)
    rig.run()
    assert "".join(s[0] for s in rig.started[1:]) == "b" * 6 + "c" * 4 + "a" * 3
    assert rig.scheduler.roster.prompt_tokens_cached == 40 * (len(names) - 3)


def test_in_overload_lof_keeps_short_answers_for_last() -> None:
    rng = random.Random(6)
    rig = Rig("lof", max_seqs=1)
    wanted = [rng.randint(1, 40) for _ in range(30)]
    for i, max_tokens in enumerate(wanted):
        rig.add(str(i), numbers(rng, 3), max_tokens)
    rig.run()
    assert [wanted[int(s)] for s in rig.started] == sorted(wanted, reverse=True)


def test_in_overload_hrrn_waits_follow_prompt_lengths() -> None:
    rng = random.Random(6)
    rig = Rig("hrrn", num_blocks=2000, max_seqs=1, budget=64)
    lengths = [rng.choice([4, 200]) for _ in range(60)]
    for i, length in enumerate(lengths):
        rig.add(str(i), numbers(rng, length), 1)
    rig.run()
    waits: dict[int, list[int]] = {4: [], 200: []}
    for place, seq_id in enumerate(rig.started):
        waits[lengths[int(seq_id)]].append(place)
    assert max(waits[4]) < len(waits[4]) + 2  # short ones first; the first step had no waits to compare yet
    late = Rig("hrrn", num_blocks=2000, max_seqs=1, budget=64)
    late.add("running", numbers(rng, 4), 400)
    late.step()
    late.add("long", numbers(rng, 200), 1)
    while late.scheduler.roster.sequences["running"].num_outputs < 399:
        late.step()
    late.add("short", numbers(rng, 4), 1)
    late.run()
    assert late.started == ["running", "long", "short"]  # the long one has waited for its length


# -- one prefix is computed once -------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("length", [17, 40, 41])
def test_eight_equal_prompts_at_once_compute_their_prefix_once(policy: str, length: int) -> None:
    rig = Rig(policy, num_blocks=200, budget=16, max_seqs=8)
    prompt = numbers(random.Random(length), length)
    for i in range(8):
        rig.add(str(i), prompt, 1)
    rig.run()
    tail = length - (length - 1) // SIZE * SIZE
    assert rig.clock == length + 7 * tail
    assert rig.scheduler.roster.prompt_tokens_cached == 7 * (length - tail)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_reserves_follow_the_policy_too(policy: str) -> None:
    rig = Rig(policy, num_blocks=8, max_seqs=4)
    for i, (priority, max_tokens) in enumerate([(2, 2), (1, 3), (0, 4)]):
        ids = tuple(range(100 * i + 10, 100 * i + 10 + 6 * SIZE))
        message = AddSequence(
            seq_id=str(i),
            prompt_ids=ids,
            sampling=Sampling(max_tokens=max_tokens),
            root=ROOT,
            block_names=tuple(block_names(ids, SIZE, ROOT)),
            priority=priority,
        )
        rig.scheduler.reserve(ReserveSequence(sequence=message))
    got: list[str] = []
    while rig.scheduler.roster.sequences:
        for seq in rig.step().reserved:
            got.append(seq.seq_id)
            rig.scheduler.start(StartSequence(seq_id=seq.seq_id, first_tokens=((0, 7),)))
    assert got == {"priority": ["2", "1", "0"], "lof": ["2", "1", "0"]}.get(policy, ["0", "1", "2"])
