"""The scheduler against a memory that remembers: each slot holds the digest of all tokens that its KV depends on.

A random load of whole requests, hand-offs and reserves runs to its end. Before a token is computed, every slot before
it must hold what that sequence's tokens say; so a wrong prefix hit, a block given twice or a lost one is seen at once.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvstore.blocks import block_names, namespace_root
from kvstore.pool import BlockPool
from services.engine.budget import share_budget
from services.engine.intake import Limits
from services.engine.messages import AddSequence, ReserveSequence, Sampling, SequenceOutput, StartSequence
from services.engine.placing import MAX_OVERTAKEN
from services.engine.policies import POLICIES
from services.engine.runner import Tally, tally_of
from services.engine.scheduler import Scheduler, Step
from services.engine.sequence import Phase, Sequence
from services.engine_config import DEFAULT_ENGINE, EngineConfig

VOCAB = 50
MODEL_LEN = 200
KINDS = ["whole", "whole", "hand-off", "reserve", "reserve-lost"]
LOADS = ["whole", "part", "none", "fence", "abort", "abort-fence"]  # what becomes of a load from a peer


@dataclass(frozen=True)
class Scenario:
    """A machine and the requests that come to it."""

    block_size: int
    num_blocks: int
    budget: int
    max_seqs: int
    seed: int
    kinds: tuple[str, ...]  # of each request: whole, hand-off, reserve, reserve-lost
    offers: bool = False  # peers offer leading blocks
    resumes: bool = False  # choices bring outputs of their own along
    rules: EngineConfig = DEFAULT_ENGINE
    prefix_cache: bool = True
    eviction: str = "lru"


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    return Scenario(
        block_size=draw(st.sampled_from([1, 2, 4, 16])),
        num_blocks=draw(st.integers(4, 40)),
        budget=draw(st.integers(1, 64)),
        max_seqs=draw(st.integers(1, 8)),
        seed=draw(st.integers(0, 2**32)),
        kinds=tuple(draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=16))),
    )


@dataclass
class World:
    """Scheduler, memory, and the peers of hand-offs."""

    scenario: Scenario
    random: random.Random
    scheduler: Scheduler
    slots: dict[int, int] = field(
        default_factory=dict
    )  # block * block_size + offset -> digest of the tokens up to there
    fenced_blocks: dict[str, set[int]] = field(default_factory=dict)  # quarantined, by sequence
    due: list[tuple[int, str, str]] = field(default_factory=list)  # (step, action, sequence)
    tokens: dict[str, list[int]] = field(default_factory=dict)  # what each sequence gave
    ends: dict[str, str] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)  # choices that were not wanted to their end
    started: set[str] = field(default_factory=set)
    tally: Tally = field(default_factory=Tally)

    @classmethod
    def of(cls, scenario: Scenario) -> World:
        limits = Limits(scenario.num_blocks, scenario.block_size, MODEL_LEN, VOCAB)
        scheduler = Scheduler(
            BlockPool(scenario.num_blocks, scenario.prefix_cache, scenario.eviction),
            limits,
            max_num_batched_tokens=scenario.budget,
            max_num_seqs=scenario.max_seqs,
            rules=scenario.rules,
        )
        return cls(scenario, random.Random(scenario.seed), scheduler)

    def messages(self) -> list[tuple[int, str, AddSequence]]:
        """(arrival step, kind, message) of each request that can be served."""
        found = []
        size, capacity = self.scenario.block_size, self.scenario.num_blocks * self.scenario.block_size
        root = namespace_root(salt="", model="m", tokenizer="t", dtype="f", block_size=size, layout_version=1)
        shared = [self.random.randrange(VOCAB) for _ in range(60)]
        lengths = [self.random.randint(1, min(60, capacity - 2, MODEL_LEN - 2)) for _ in range(3)]
        for i, kind in enumerate(self.scenario.kinds):
            length = self.random.choice(lengths)
            common = self.random.choice([0, length // 2, length])
            prompt = tuple(shared[:common] + [self.random.randrange(VOCAB) for _ in range(length - common)])
            most = capacity - length + (kind == "hand-off")
            outputs = tuple(self.random.randrange(VOCAB) for _ in range(self.random.choice([0, 0, min(3, most - 1)])))
            if len(outputs) + length + 1 > capacity:
                outputs = ()
            sampling = Sampling(max_tokens=len(outputs) + self.random.randint(1, max(1, min(20, most - len(outputs)))))
            message = AddSequence(
                seq_id=f"{kind}-{i}",
                prompt_ids=prompt,
                output_ids=outputs,
                sampling=sampling,
                root=root,
                block_names=tuple(block_names(prompt, size, root)),
                hand_off=kind == "hand-off",
                priority=self.random.choice([0, 0, 0, 1]),
                n=1 if outputs else self.random.choice([1, 1, 2, 5]),
            )
            if self.scenario.offers and not kind.startswith("reserve"):
                message = dataclasses.replace(message, offered_blocks=self.random.choice([0, 1, 2, 100]))
            if self.scenario.resumes and message.n > 1:
                most_given = min(6, sampling.max_tokens - 1)
                given = [
                    self.random.choices(range(VOCAB), k=self.random.randint(0, most_given)) for _ in range(message.n)
                ]
                message = dataclasses.replace(message, outputs=tuple((i, tuple(ids)) for i, ids in enumerate(given)))
            found.append((self.random.randint(1, 20), kind, message))
        return found

    def digest(self, seq: Sequence, position: int) -> int:
        return hash(tuple(seq.token_ids[: position + 1]))

    def slot(self, seq: Sequence, position: int) -> int:
        size = self.scenario.block_size
        return seq.block_ids[position // size] * size + position % size

    def run_work(self, step: Step) -> dict[str, int]:
        """Compute: check what each token sees, write its slot, draw the next one."""
        tokens = {}
        quarantined = set().union(*self.fenced_blocks.values()) if self.fenced_blocks else set()
        for work in step.work:
            seq = work.sequence
            for position in range(work.start):
                assert self.slots.get(self.slot(seq, position)) == self.digest(seq, position), (seq.seq_id, position)
            for position in range(work.start, work.stop):
                assert seq.block_ids[position // self.scenario.block_size] not in quarantined
                self.slots[self.slot(seq, position)] = self.digest(seq, position)
            tokens |= {key: self.random.randrange(VOCAB) for key, _ in work.draws}
        return tokens

    def copy_blocks(self) -> None:
        size = self.scenario.block_size
        for source, target in self.scheduler.roster.take_copies():
            for offset in range(size):
                if source * size + offset in self.slots:
                    self.slots[target * size + offset] = self.slots[source * size + offset]

    def drop_some_choice(self) -> None:
        """The router found a stop string in one choice of several."""
        groups = [g for g, choices in self.scheduler.roster.groups.items() if len(choices) > 1]
        if groups and self.random.random() < 0.1:
            group = self.random.choice(groups)
            choice = self.random.choice(list(self.scheduler.roster.groups[group]))
            if any(c in self.scheduler.roster.groups[group] for c in range(choice)):  # the first one stays
                self.scheduler.drop(group, choice)
                self.dropped.add(name_of(group, choice))
                self.scheduler.roster.check()

    def peer_writes(self, seq: Sequence) -> None:
        """The writer of a hand-off fills what the reader does not have."""
        for position in range(seq.num_named_blocks * self.scenario.block_size, seq.num_given_tokens):
            self.slots[self.slot(seq, position)] = self.digest(seq, position)

    def peer_loads(self, seq: Sequence, num_blocks: int) -> None:
        """A source fills the first blocks that the sequence waits for; the rest holds rubbish."""
        size = self.scenario.block_size
        first = seq.num_named_blocks * size
        for position in range(first, first + seq.load_blocks * size):
            is_right = position < first + num_blocks * size
            self.slots[self.slot(seq, position)] = self.digest(seq, position) if is_right else -1

    def load_ends(self, seq_id: str, how: str, now: int) -> None:
        seq = self.scheduler.roster.loading.get(seq_id)
        if seq is None:
            return
        count = {"whole": seq.load_blocks, "part": self.random.randint(0, seq.load_blocks)}.get(how, 0)
        self.peer_loads(seq, count)
        if how.endswith("fence"):
            self.fenced_blocks[seq_id] = set(seq.block_ids)
            self.due.append((now + 5, "fence", seq_id))
        if how.startswith("abort"):
            self.take(self.scheduler.abort(seq_id, quarantine=how == "abort-fence"))
        else:
            self.scheduler.loaded(seq_id, count, quarantine=how == "fence")
        self.scheduler.roster.check()

    def take(self, output: SequenceOutput | None) -> None:
        if output is None:
            return
        name = name_of(output.seq_id, output.choice)
        assert name not in self.ends
        given = self.tokens.setdefault(name, [])
        given += output.token_ids
        if output.finish_reason:
            self.ends[name] = output.finish_reason

    def peers_act(self, now: int) -> None:
        for at, action, seq_id in sorted(self.due):
            if at > now:
                continue
            self.due.remove((at, action, seq_id))
            seq = self.scheduler.roster.sequences.get(seq_id)
            if action == "release":
                self.scheduler.release(seq_id)
            elif action == "start" and seq is not None:
                self.peer_writes(seq)
                tokens = tuple((choice, self.random.randrange(VOCAB)) for choice in seq.choices)
                for output in self.scheduler.start(StartSequence(seq_id=seq_id, first_tokens=tokens)):
                    self.take(output)
                self.copy_blocks()
            elif action == "lose" and seq is not None:
                self.fenced_blocks[seq_id] = set(seq.block_ids)
                self.take(self.scheduler.abort(seq_id, quarantine=True))
                self.due.append((now + 5, "fence", seq_id))
            elif action.startswith("load "):
                self.load_ends(seq_id, action.removeprefix("load "), now)
            elif action == "fence":
                del self.fenced_blocks[seq_id]
                self.scheduler.roster.pool.unquarantine(seq_id)

    def after_schedule(self, step: Step) -> None:
        for seq in step.reserved:
            action = "lose" if seq.seq_id.startswith("reserve-lost") else "start"
            self.due.append((step.number + self.random.randint(1, 4), action, seq.seq_id))
        for seq in step.loading:
            action = f"load {self.random.choice(LOADS)}"
            self.due.append((step.number + self.random.randint(1, 9), action, seq.seq_id))

    def after_complete(self, outputs: list[SequenceOutput], now: int) -> None:
        for output in outputs:
            self.take(output)
            if output.seq_id.startswith("hand-off") and output.choice == 0:
                self.due.append((now + self.random.randint(1, 6), "release", output.seq_id))


def name_of(seq_id: str, choice: int) -> str:
    return f"{seq_id}/{choice}" if choice else seq_id


def names_of(message: AddSequence) -> list[str]:
    return [name_of(message.seq_id, choice) for choice in range(message.n)]


def check_step(world: World, step: Step, running_before: dict[str, int]) -> None:
    scenario, scheduler = world.scenario, world.scheduler
    scheduler.roster.check()
    ids = [w.sequence.seq_id for w in step.work]
    assert len(set(ids)) == len(ids) <= scenario.max_seqs
    assert sum(w.count for w in step.work) <= scenario.budget
    assert all(s.block_ids for s in (*step.started, *step.reserved, *step.loading))
    assert all(s.phase is Phase.LOADING for s in step.loading)
    for seq in step.started:
        assert seq.phase is Phase.RUNNING
        assert seq.seq_id not in world.started, "a first chunk is announced once"
        world.started.add(seq.seq_id)
    for work in step.work:
        seq = work.sequence
        assert seq.phase is Phase.RUNNING
        assert work.start == seq.num_computed_tokens
        assert 1 <= work.count <= seq.num_missing_tokens
        assert work.stop <= len(seq.block_ids) * scenario.block_size
    if scenario.rules != DEFAULT_ENGINE:
        return
    decodes = [w for w in step.work if w.sequence.seq_id in running_before and running_before[w.sequence.seq_id] == 1]
    prefills = [s for s in scheduler.roster.running.values() if running_before.get(s.seq_id, 0) > 1]
    if prefills and len(step.work) < scenario.max_seqs:
        first = min(prefills, key=lambda s: s.order)
        left = scenario.budget - len(decodes)
        granted = next((w.count for w in step.work if w.sequence is first), 0)
        ahead = [w for w in step.work if w.sequence.order < first.order and w not in decodes]
        assert ahead or granted >= min(first.num_missing_tokens, left - left // 2)


def steps_of(world: World) -> Iterator[Step]:
    """Run all requests to their end, yielding each step after it completed."""
    arrivals = world.messages()
    now = 0
    while arrivals or world.scheduler.roster.sequences or world.due:
        now += 1
        assert now < 3_000, "the load does not end"
        for item in [a for a in arrivals if a[0] <= now]:
            arrivals.remove(item)
            _, kind, message = item
            if kind.startswith("reserve"):
                world.scheduler.reserve(ReserveSequence(sequence=message))
            else:
                world.scheduler.add(message)
        world.peers_act(now)
        before = {s.seq_id: s.num_missing_tokens for s in world.scheduler.roster.running.values()}
        step = world.scheduler.schedule()
        check_step(world, step, before)
        world.after_schedule(step)
        tokens = world.run_work(step)
        world.tally += tally_of(step.work, sum(w.count for w in step.work))
        outputs = world.scheduler.complete(step, tokens, {})
        world.copy_blocks()
        world.after_complete(outputs, now)
        world.drop_some_choice()
        world.scheduler.roster.check()
        yield step


rules = st.builds(
    EngineConfig,
    policy=st.sampled_from(sorted(POLICIES)),
    batching=st.sampled_from(["continuous", "continuous", "continuous", "static", "request"]),
    ageing_bound_tokens=st.sampled_from([1, 20, 100, 10_000]),
    lpm_queue_bound=st.sampled_from([0, 4, 128]),
    long_prefill_threshold_tokens=st.sampled_from([0, 0, 1, 7]),
    mixed_batches=st.booleans(),
    prefill_interval_steps=st.sampled_from([1, 1, 2, 5]),
    admission_watermark=st.sampled_from([0.0, 0.0, 0.1, 0.9]),
    reserve_output=st.sampled_from([0.0, 0.0, 0.5, 2.0]),
)


@settings(max_examples=150, deadline=None)
@given(scenarios(), rules, st.booleans(), st.sampled_from(["lru", "lfu"]))
def test_every_load_ends_right_under_every_policy_and_setting(
    scenario: Scenario, rules: EngineConfig, prefix_cache: bool, eviction: str
) -> None:
    check_load(dataclasses.replace(scenario, rules=rules, prefix_cache=prefix_cache, eviction=eviction))


@settings(max_examples=120, deadline=None)
@given(scenarios(), rules | st.just(DEFAULT_ENGINE))
@example(
    Scenario(
        block_size=2,
        num_blocks=8,
        budget=7,
        max_seqs=7,
        seed=63,  # one choice loads again while another runs, and both are aborted
        kinds=("whole", "whole", "reserve", "whole", "whole", "hand-off", "reserve", "whole", "whole", "reserve"),
    ),
    EngineConfig(policy="priority"),
)
def test_what_peers_offer_is_loaded_in_part_or_whole_or_computed(scenario: Scenario, rules: EngineConfig) -> None:
    check_load(dataclasses.replace(scenario, rules=rules, offers=True))


@settings(max_examples=120, deadline=None)
@given(scenarios(), rules | st.just(DEFAULT_ENGINE), st.booleans())
def test_choices_that_bring_outputs_along_go_on_behind_them(
    scenario: Scenario, rules: EngineConfig, prefix_cache: bool
) -> None:
    check_load(dataclasses.replace(scenario, rules=rules, prefix_cache=prefix_cache, resumes=True))


ONE_TOKEN = Scenario(block_size=2, num_blocks=29, budget=1, max_seqs=2, seed=0, kinds=())
"""An urgent prompt of which all but the last token is cached claims a slot, while another has the only token."""


@settings(max_examples=120, deadline=None)
@given(scenarios())
@example(dataclasses.replace(ONE_TOKEN, kinds=("whole", "whole", "reserve", "whole", "whole")))
@example(dataclasses.replace(ONE_TOKEN, kinds=("whole", "whole", "reserve", *["whole"] * 3, "hand-off", "whole")))
def test_every_load_ends_with_right_kv_within_budget_and_with_books_that_agree(scenario: Scenario) -> None:
    check_load(scenario)


def check_load(scenario: Scenario) -> None:
    world = World.of(scenario)
    messages = {m.seq_id: m for _, _, m in World.of(scenario).messages()}
    for _ in steps_of(world):
        pass
    for seq_id, message in messages.items():
        left = message.sampling.max_tokens - len(message.output_ids)
        if seq_id.startswith("reserve-lost"):
            assert world.ends[seq_id] == "abort"
            continue
        if world.ends.get(seq_id) == "abort":
            assert message.offered_blocks, "only a load was aborted"
            continue
        for choice, name in enumerate(names_of(message)):
            given = dict(message.outputs).get(choice, ())
            left = message.sampling.max_tokens - len(message.output_ids) - len(given[1:])  # the first is told once more
            assert world.tokens.get(name, [])[: len(given[:1])] in ([], list(given[:1]))
            if name in world.dropped:
                assert len(world.tokens.get(name, ())) <= left
            elif seq_id.startswith("hand-off"):
                assert len(world.tokens[name]) == 1
                assert world.ends.get(name, "") == ("length" if left == 1 else "")
            else:
                assert len(world.tokens[name]) == left
                assert world.ends[name] == "length"
    check_accounting(world, messages)
    counts = world.scheduler.roster.pool.counts()
    assert counts.used == counts.reserved == counts.quarantined == 0


def check_accounting(world: World, messages: dict[str, AddSequence]) -> None:
    """Each prompt token was computed or found, once; each output but the last was forwarded once; the rest again."""
    prompts = sum(len(m.prompt_ids) for m in messages.values() if not m.seq_id.startswith("reserve"))
    counted = world.tally.prompt_tokens_computed + world.scheduler.roster.prompt_tokens_cached
    if "abort" in {world.ends.get(m) for m in messages if not m.startswith("reserve")}:
        assert counted <= prompts
    else:
        assert counted == prompts
    decoding = [m for m in messages.values() if not m.seq_id.startswith(("reserve-lost", "hand-off"))]
    answers = [len(world.tokens.get(name, [])) for m in decoding for name in names_of(m)]
    several = [len(dict(m.outputs).get(choice, ())) > 1 for m in decoding for choice in range(m.n)]
    forwarded = sum(max(0, n - 1 - told_again) for n, told_again in zip(answers, several, strict=True))
    assert world.tally.decode_tokens_forwarded == forwarded


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=12),
    priorities=st.lists(st.integers(0, 1), min_size=12, max_size=12),
    max_seqs=st.integers(1, 4),
)
def test_equal_requests_start_by_priority_then_arrival(sizes: list[int], priorities: list[int], max_seqs: int) -> None:
    limits = Limits(num_blocks=8, block_size=4, max_model_len=64, vocab_size=VOCAB)
    scheduler = Scheduler(BlockPool(8), limits, max_num_batched_tokens=8, max_num_seqs=max_seqs)
    for i in range(len(sizes)):
        sampling = Sampling(max_tokens=4)
        scheduler.add(
            AddSequence(seq_id=str(i), prompt_ids=(1,) * 6, sampling=sampling, root=b"", priority=priorities[i])
        )
    started: list[str] = []
    while scheduler.roster.sequences:
        step = scheduler.schedule()
        started += [s.seq_id for s in step.started]
        scheduler.complete(step, {w.sequence.seq_id: 1 for w in step.work if w.samples}, {})
    assert started == sorted(started, key=lambda i: (priorities[int(i)], int(i)))


@settings(max_examples=40, deadline=None)
@given(small=st.integers(1, 6), seed=st.integers(0, 1000))
def test_a_large_request_is_passed_only_so_often_while_small_ones_keep_coming(small: int, seed: int) -> None:
    limits = Limits(num_blocks=16, block_size=4, max_model_len=64, vocab_size=VOCAB)
    scheduler = Scheduler(BlockPool(16), limits, max_num_batched_tokens=32, max_num_seqs=8)
    source, count, passed = random.Random(seed), 0, 0
    large = AddSequence(seq_id="large", prompt_ids=(1,) * 58, sampling=Sampling(max_tokens=2), root=b"")
    for now in range(2000):
        while len(scheduler.roster.queue) < 4:
            prompt = (1,) * (small * 2)
            tokens = source.randint(2, 9)
            scheduler.add(
                AddSequence(seq_id=f"s{count}", prompt_ids=prompt, sampling=Sampling(max_tokens=tokens), root=b"")
            )
            count += 1
        if now == 10:
            scheduler.add(large)
        step = scheduler.schedule()
        scheduler.roster.check()
        if "large" in {s.seq_id for s in step.started}:
            assert passed <= MAX_OVERTAKEN + 8  # 8: placed in the step that reached the bound
            return
        passed += len(step.started) if now > 10 else 0
        scheduler.complete(step, {w.sequence.seq_id: 1 for w in step.work if w.samples}, {})
    raise AssertionError("the large request never started")


@given(st.lists(st.integers(1, 100), max_size=12), st.integers(0, 120))
def test_a_budget_is_shared_whole_the_first_gets_half_and_short_ones_end(wants: list[int], budget: int) -> None:
    grants = share_budget(wants, budget)
    assert sum(grants) == min(budget, sum(wants))
    assert all(0 <= grant <= want for grant, want in zip(grants, wants, strict=True))
    if wants and budget:
        assert grants[0] >= min(wants[0], budget - budget // 2)
    left = budget - min(wants[0], budget - budget // 2) if wants else 0
    for want, grant in list(zip(wants, grants, strict=True))[1:]:
        if want <= left:
            assert grant == want
            left -= want
