"""The policy against a brute force that is written from the formula, and bursts against the bound on their spread."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.blocks import block_names
from services.protocol.proto import worker_pb2
from services.router.bookings import Booking, Bookings
from services.router.member import WorkerState
from services.router.policy import (
    COPY,
    DELAY,
    POLICIES,
    PRESSURE_STEPS,
    Fabric,
    Prompt,
    Worker,
    choose,
    uncached_tokens,
)
from services.router.view import View
from tests.fake_worker import fingerprint

untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A busy machine is no failure."""

prompts = st.builds(
    Prompt,
    num_tokens=st.integers(1, 3000),
    block_size=st.sampled_from([1, 16, 32]),
    token_bytes=st.integers(1, 100_000),
    num_layers=st.integers(1, 48),
)


@st.composite
def clusters(draw: st.DrawFn) -> list[Worker]:
    roles = draw(st.lists(st.sampled_from(["prefill", "decode", "mixed"]), max_size=7))
    return [
        Worker(
            worker_id=f"w{i}",
            role=role,
            cached_blocks=draw(st.integers(0, 200)),
            queued_tokens=draw(st.integers(0, 5000)),
            prefill_tokens_per_s=draw(st.floats(1, 1e5)),
            active_sequences=draw(st.integers(0, 64)),
            step_ms=draw(st.floats(0.1, 500)),
            free_blocks=draw(st.integers(-50, 400)),
            num_blocks=draw(st.integers(0, 400)),
            full_share=draw(st.floats(0, 1)),
        )
        for i, role in enumerate(roles)
    ]


fabrics = st.builds(
    Fabric,
    default_bytes_per_s=st.floats(1e3, 1e10),
    measured=st.dictionaries(st.tuples(*[st.integers(0, 6).map("w{}".format)] * 2), st.floats(1e3, 1e10), max_size=6),
)


def crowd_of(workers: list[Worker], prompt: Prompt) -> float:
    """Prompts on a prefill worker that could take this one, on average."""
    firsts = {p.worker_id: p for p, _ in naive_options(prompt, workers) if p.role == "prefill"}
    return sum(p.active_sequences for p in firsts.values()) / len(firsts) if firsts else 0.0


def copy_of(prompt: Prompt, workers: list[Worker], p: Worker, crowd: float) -> float:
    """Price of the blocks that p lacks and another worker that computes prompts has; in ms."""
    rivals = [w for w in workers if w.role != "decode" and w.num_blocks * prompt.block_size >= prompt.num_tokens]
    full = (prompt.num_tokens - 1) // prompt.block_size
    lacking = max(min(full, w.cached_blocks) for w in rivals) - min(full, p.cached_blocks)
    again_s = lacking * prompt.block_size / p.prefill_tokens_per_s
    return 1000 * COPY * p.full_share * (again_s + DELAY * crowd * again_s)


def naive_cost(prompt: Prompt, p: Worker, d: Worker, fabric: Fabric, crowd: float) -> float:
    """The formula of the module, term by term, in seconds and then ms."""
    full = (prompt.num_tokens - 1) // prompt.block_size
    compute_s = (prompt.num_tokens - min(full, p.cached_blocks) * prompt.block_size) / p.prefill_tokens_per_s
    cost_s = p.queued_tokens / p.prefill_tokens_per_s + compute_s
    if p.worker_id != d.worker_id:
        missing = prompt.num_tokens - min(full, d.cached_blocks) * prompt.block_size
        rate = fabric.measured.get((p.worker_id, d.worker_id), fabric.default_bytes_per_s)
        overlap_s = compute_s - compute_s / prompt.num_layers
        cost_s += max(0.0, missing * prompt.token_bytes / rate - overlap_s)
    blocks = (prompt.num_tokens + prompt.block_size - 1) // prompt.block_size
    if blocks > d.free_blocks:
        steps = (blocks - d.free_blocks) * prompt.block_size / max(1, d.active_sequences)
        cost_s += steps * d.step_ms / 1000
    cost_s += DELAY * crowd * compute_s
    return 1000 * cost_s + d.active_sequences * d.step_ms * PRESSURE_STEPS


def naive_options(prompt: Prompt, workers: list[Worker]) -> list[tuple[Worker, Worker]]:
    options = []
    for p, d in itertools.product(workers, workers):
        legal = (p.role, d.role) == ("prefill", "decode") or (p.role == "mixed" and p is d)
        if legal and min(p.num_blocks, d.num_blocks) * prompt.block_size >= prompt.num_tokens:
            options.append((p, d))
    return options


@untimed
@given(prompts, clusters(), fabrics, st.randoms(use_true_random=False))
def test_the_choice_is_the_cheapest_of_all_options_in_any_order(
    prompt: Prompt, workers: list[Worker], fabric: Fabric, rng: random.Random
) -> None:
    options = naive_options(prompt, workers)
    decision = choose("cost", prompt, workers, fabric)
    if not options:
        assert decision is None
        return
    assert decision is not None
    assert decision.considered == len(options)
    crowd = crowd_of(workers, prompt)
    costs = {
        (p.worker_id, "" if p is d else d.worker_id): naive_cost(prompt, p, d, fabric, crowd)
        + copy_of(prompt, workers, p, crowd)
        for p, d in options
    }
    chosen = decision.choice
    assert chosen.terms.cost_ms == pytest.approx(costs[chosen.prefill_id, chosen.decode_id], rel=1e-6, abs=1e-6)
    assert costs[chosen.prefill_id, chosen.decode_id] <= min(costs.values()) * (1 + 1e-9) + 1e-6
    rng.shuffle(workers)
    assert choose("cost", prompt, workers, fabric) == decision


def cost_with_pull(prompt: Prompt, p: Worker, d: Worker, holder: Worker, fabric: Fabric, crowd: float) -> float:
    """The formula again for a worker that is as deep as the holder, after the time that loading takes."""
    assert fabric.pull_setup_ms is not None
    full = (prompt.num_tokens - 1) // prompt.block_size
    gained = min(full, holder.cached_blocks) - min(full, p.cached_blocks)
    rate = fabric.measured.get((holder.worker_id, p.worker_id), fabric.default_bytes_per_s)
    load_s = gained * prompt.block_size * prompt.token_bytes / rate
    after = replace(p, cached_blocks=holder.cached_blocks)
    return fabric.pull_setup_ms + 1000 * load_s + naive_cost(prompt, after, d, fabric, crowd)


@untimed
@given(prompts, clusters(), fabrics, st.floats(0, 500), st.booleans(), st.randoms(use_true_random=False))
def test_kv_is_loaded_from_whomever_makes_the_choice_cheapest(
    prompt: Prompt, workers: list[Worker], fabric: Fabric, setup_ms: float, is_bounded: bool, rng: random.Random
) -> None:
    fastest = max([fabric.default_bytes_per_s, *fabric.measured.values()]) if is_bounded else float("inf")
    fabric = replace(fabric, pull_setup_ms=setup_ms, fastest_bytes_per_s=fastest)
    full = (prompt.num_tokens - 1) // prompt.block_size
    costs: dict[tuple[str, str, str], float] = {}
    allowed = set()  # loading must be faster than computing, whatever it spares others
    crowd = crowd_of(workers, prompt)
    for p, d in naive_options(prompt, workers):
        pair = p.worker_id, "" if p is d else d.worker_id
        copy_ms = copy_of(prompt, workers, p, crowd)
        costs[*pair, ""] = naive_cost(prompt, p, d, fabric, crowd) + copy_ms
        allowed.add((*pair, ""))
        for holder in workers if p is not d else ():
            if holder is not p and min(full, holder.cached_blocks) > min(full, p.cached_blocks):
                costs[*pair, holder.worker_id] = cost_with_pull(prompt, p, d, holder, fabric, crowd) + copy_ms
                if loading_ms(prompt, p, holder, fabric) < computing_ms(prompt, p) * (1 - 1e-9):
                    allowed.add((*pair, holder.worker_id))
    decision = choose("cost", prompt, workers, fabric)
    assert (decision is None) == (not costs)
    if decision is None:
        return
    chosen = decision.choice
    cost = costs[chosen.prefill_id, chosen.decode_id, chosen.holder_id]
    assert chosen.terms.cost_ms == pytest.approx(cost, rel=1e-6, abs=1e-6)
    assert cost <= min(costs[name] for name in allowed) * (1 + 1e-9) + 1e-6
    if chosen.holder_id:  # it is faster than computing, not only cheaper after the hand-off
        computed_ms = computing_ms(prompt, prefill_of(workers, chosen.prefill_id))
        assert chosen.terms.load_ms + chosen.terms.compute_ms < computed_ms
    rng.shuffle(workers)
    assert choose("cost", prompt, workers, fabric) == decision


def computing_ms(prompt: Prompt, p: Worker) -> float:
    return 1000 * uncached_tokens(prompt, p.cached_blocks) / p.prefill_tokens_per_s


def loading_ms(prompt: Prompt, p: Worker, holder: Worker, fabric: Fabric) -> float:
    """Until all KV is there, where the holder's is loaded first."""
    assert fabric.pull_setup_ms is not None
    after = uncached_tokens(prompt, holder.cached_blocks)
    loaded_bytes = (uncached_tokens(prompt, p.cached_blocks) - after) * prompt.token_bytes
    rate = fabric.measured.get((holder.worker_id, p.worker_id), fabric.default_bytes_per_s)
    return fabric.pull_setup_ms + 1000 * loaded_bytes / rate + 1000 * after / p.prefill_tokens_per_s


def prefill_of(workers: list[Worker], worker_id: str) -> Worker:
    return next(w for w in workers if w.worker_id == worker_id)


@untimed
@given(prompts, clusters(), fabrics)
def test_equal_costs_go_to_the_lowest_ids(prompt: Prompt, workers: list[Worker], fabric: Fabric) -> None:
    decision = choose("cost", prompt, workers, fabric)
    if decision is not None:
        keys = [(c.terms.cost_ms, c.prefill_id, c.decode_id) for c in decision.candidates]
        assert keys == sorted(keys)
        assert (decision.choice.terms.cost_ms, decision.choice.prefill_id, decision.choice.decode_id) == keys[0]


@untimed
@given(prompts, clusters(), st.integers(0, 1000), st.integers(0, 1 << 30))
def test_every_policy_chooses_a_legal_option_in_any_order_of_workers(
    prompt: Prompt, workers: list[Worker], turn: int, seed: int
) -> None:
    legal = {(p.worker_id, "" if p is d else d.worker_id) for p, d in naive_options(prompt, workers)}
    rng = random.Random(seed)
    draws = (rng.random(), rng.random(), rng.random(), rng.random())
    for policy in POLICIES:
        decision = choose(policy, prompt, workers, Fabric(), turn, draws)
        assert choose(policy, prompt, rng.sample(workers, len(workers)), Fabric(), turn, draws) == decision
        assert (decision is None) == (not legal)
        if decision is not None:
            assert (decision.choice.prefill_id, decision.choice.decode_id) in legal


@untimed
@given(prompts, clusters())
def test_least_loaded_is_the_least_by_brute_force(prompt: Prompt, workers: list[Worker]) -> None:
    options = naive_options(prompt, workers)
    if options:
        decision = choose("least-loaded", prompt, workers, Fabric())
        assert decision is not None
        best = min((p.queued_tokens, d.active_sequences, p.worker_id, d.worker_id) for p, d in options)
        chosen = decision.choice
        assert (chosen.prefill_id, chosen.decode_id or chosen.prefill_id) == best[2:]


@untimed
@given(prompts, clusters())
def test_round_robin_gives_each_first_worker_the_same_share(prompt: Prompt, workers: list[Worker]) -> None:
    options = naive_options(prompt, workers)
    if options:
        firsts = {p.worker_id for p, _ in options}
        rounds = len(firsts) * 6
        taken = Counter()
        for turn in range(rounds):
            decision = choose("round-robin", prompt, workers, Fabric(), turn)
            assert decision is not None
            taken[decision.choice.prefill_id] += 1
        assert set(taken.values()) == {6}


@untimed
@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["book", "done", "release", "load"])), max_size=60))
def test_the_ledger_agrees_with_a_list_of_what_is_outstanding(steps: list[tuple[str, str]]) -> None:
    ledger, computing, alive = Bookings(), set(), set()
    for request_id, what in steps:
        if what == "book":
            ledger.book(request_id, Booking(prefill_id="p", prefill_tokens=10, decode_id="d", decode_blocks=2))
            computing.add(request_id)
            alive.add(request_id)
        elif what == "done":
            ledger.prefill_done(request_id)
            computing.discard(request_id)
        elif what == "release":
            ledger.release(request_id)
            computing.discard(request_id)
            alive.discard(request_id)
        else:
            ledger.load_came("p")
            ledger.load_came("d")
            # A load that came in just now and shows nothing must not hide what is outstanding.
            assert ledger.queued_tokens("p", 0) == 10 * len(computing)
            assert ledger.active_sequences("d", 0) == len(alive)
        assert len(ledger) == len(alive)
        assert ledger.queued_tokens("p", 0) >= 10 * len(computing)
        assert ledger.active_sequences("d", 0) >= len(alive)


class Router:
    """A view and its bookings, choosing as the flow does; nothing ever finishes unless told."""

    def __init__(self, prefills: int, decodes: int) -> None:
        self.now_s = 0.0
        self.view = View("model-a", "tokenizer-a", 5.0, lambda: self.now_s)
        roles = [("prefill", i) for i in range(prefills)] + [("decode", i) for i in range(decodes)]
        for role, i in roles:
            registration = worker_pb2.Registration(
                worker_id=f"{role}{i}", role=role, epoch="e", fingerprint=fingerprint(), num_blocks=10_000,
                transport="tcp",
            )  # fmt: skip
            self.view.registered(registration, f"{role}{i}:1")
            self.view.link_is(f"{role}{i}", WorkerState.READY)

    def route(self, request_id: str, tokens: list[int]) -> tuple[str, str]:
        names = block_names(tokens, 16, bytes(16))
        prompt = Prompt(num_tokens=len(tokens), block_size=16, token_bytes=512, num_layers=4)
        workers = {w.worker_id: w for w in self.view.candidates(names)}
        decision = choose("cost", prompt, list(workers.values()), Fabric())
        assert decision is not None
        p, d = decision.choice.prefill_id, decision.choice.decode_id
        work = uncached_tokens(prompt, workers[p].cached_blocks)
        self.view.bookings.book(
            request_id, Booking(prefill_id=p, prefill_tokens=work, decode_id=d, decode_blocks=prompt.num_blocks)
        )
        self.view.routed({p, d}, names)
        return p, d

    def finish(self, request_id: str) -> None:
        self.view.bookings.release(request_id)


@untimed
@given(st.integers(2, 5), st.integers(1, 4), st.integers(17, 400), st.integers(0, 1 << 30))
def test_64_simultaneous_cold_requests_spread_within_twice_the_mean(
    prefills: int, decodes: int, length: int, seed: int
) -> None:
    rng, router = random.Random(seed), Router(prefills, decodes)
    pairs = [router.route(str(i), [rng.randrange(50_000) for _ in range(length)]) for i in range(64)]
    for side, count in ((0, prefills), (1, decodes)):
        taken = Counter(pair[side] for pair in pairs)
        assert len(taken) == count
        assert max(taken.values()) <= 2 * 64 / count
        assert max(taken.values()) <= 2 * min(taken.values()) + 1


def test_a_burst_with_one_shared_prefix_uses_all_workers_and_a_trickle_stays_on_the_warm_one() -> None:
    prefix = list(range(512))
    burst = Router(4, 2)
    taken = Counter(burst.route(str(i), [*prefix, *range(1000 + 40 * i, 1040 + 40 * i)])[0] for i in range(64))
    assert max(taken.values()) <= 2 * 64 / 4
    trickle = Router(4, 2)
    chosen = Counter()
    for i in range(40):
        chosen[trickle.route(str(i), [*prefix, *range(1000 + 40 * i, 1040 + 40 * i)])[0]] += 1
        trickle.finish(str(i))
        trickle.now_s += 0.1
    assert max(chosen.values()) >= 0.9 * 40


@untimed
@given(prompts, clusters(), fabrics, st.integers(0, 6), st.data())
def test_the_cost_of_a_pair_never_falls_when_its_worker_has_more_to_do_or_holds_less(
    prompt: Prompt, workers: list[Worker], fabric: Fabric, index: int, data: st.DataObject
) -> None:
    if index >= len(workers):
        return
    before = workers[index]
    if before.role == "prefill":  # its sequences are the crowd's, which all pairs pay for
        field, worse = data.draw(st.sampled_from([("queued_tokens", 700), ("cached_blocks", -1)]))
    else:
        field, worse = data.draw(
            st.sampled_from([("queued_tokens", 700), ("cached_blocks", -1), ("active_sequences", 3)])
        )
        if field == "active_sequences" and before.free_blocks < prompt.num_blocks:
            return  # more sequences give blocks back sooner
    after = replace(before, **{field: max(0, getattr(before, field) + worse)})
    if field == "cached_blocks" and before.role == "decode":
        after = replace(after, cached_blocks=0)
    changed = [after if w is before else w for w in workers]
    fabric = replace(fabric, default_bytes_per_s=1e6, measured={})
    crowd = crowd_of(workers, prompt)
    assert crowd == crowd_of(changed, prompt)
    was, now = choose("cost", prompt, workers, fabric), choose("cost", prompt, changed, fabric)
    assert (was is None) == (now is None)
    if was is None or now is None:
        return
    costs = {(c.prefill_id, c.decode_id): c.terms.cost_ms for c in was.candidates}
    for c in now.candidates:
        before_ms = costs.get((c.prefill_id, c.decode_id))
        if before_ms is not None and before.worker_id in (c.prefill_id, c.decode_id):
            assert c.terms.cost_ms >= before_ms * (1 - 1e-9)
