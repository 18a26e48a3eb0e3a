"""The queue's orders against brute force: who goes next, who is shed, shares of tenants, and that nobody starves."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.admission.order import MAX_TENANTS, Order, Waiting
from services.router.admission.queue import WaitingQueue

untimed = settings(deadline=None, max_examples=60)
ORDERS = ("fcfs", "edf", "priority", "fair")
requests = st.lists(
    st.tuples(
        st.sampled_from("abc"),  # tenant
        st.integers(-2, 2),  # priority
        st.integers(1, 400),  # tokens
        st.floats(0, 20),  # seconds to its deadline
    ),
    min_size=1,
    max_size=40,
)


def waiting(index: int, tenant: str, priority: int, tokens: int, due_s: float) -> Waiting:
    return Waiting(
        request_id=str(index), tenant=tenant, priority=priority, tokens=tokens, arrived_s=index / 10,
        deadline_s=index / 10 + due_s,
    )  # fmt: skip


def fair_tags(made: list[Waiting]) -> list[float]:
    """Start tags where nothing has been served: each tenant's own tokens before a request."""
    before: Counter[str] = Counter()
    tags = []
    for w in made:
        tags.append(float(before[w.tenant]))
        before[w.tenant] += w.tokens
    return tags


@pytest.mark.parametrize("name", ORDERS)
@untimed
@given(rows=requests)
def test_the_queue_gives_out_what_sorting_gives(name: str, rows: list[tuple[str, int, int, float]]) -> None:
    order, queue = Order(name, priority_s=10.0), WaitingQueue[Waiting](1000, 10**9)
    made = [waiting(i, *row) for i, row in enumerate(rows)]
    for w in made:
        order.enter(w)
        assert queue.add(w) == []
    tags = fair_tags(made)
    rank = {
        "fcfs": lambda i: (i,),
        "edf": lambda i: (made[i].deadline_s, i),
        "priority": lambda i: (made[i].arrived_s + 10 * made[i].priority, i),
        "fair": lambda i: (tags[i], i),
    }[name]
    assert [w.request_id for w in queue] == [str(i) for i in sorted(range(len(made)), key=rank)]
    assert queue.tokens == sum(w.tokens for w in made)


@untimed
@given(rows=requests, max_requests=st.integers(1, 10), max_tokens=st.integers(1, 1000), name=st.sampled_from(ORDERS))
def test_the_bounds_hold_and_only_those_that_matter_less_are_shed(
    rows: list[tuple[str, int, int, float]], max_requests: int, max_tokens: int, name: str
) -> None:
    order, queue = Order(name), WaitingQueue[Waiting](max_requests, max_tokens)
    for i, row in enumerate(rows):
        w = waiting(i, *row)
        before = list(queue)
        order.enter(w)
        shed = queue.add(w)
        after = list(queue)
        assert len(after) <= max_requests
        assert sum(x.tokens for x in after) <= max_tokens or len(after) == 1
        assert queue.tokens == sum(x.tokens for x in after)
        if shed == [w]:
            order.withdrawn(w)
            assert after == before
            better = [x for x in before if (x.priority, x.key) < (w.priority, w.key)]
            held = sum(x.tokens for x in better)
            assert len(better) + 1 > max_requests or held + w.tokens > max_tokens
        else:
            assert all((x.priority, x.key) > (w.priority, w.key) for x in shed)
            worst = max(((x.priority, x.key) for x in after if x is not w), default=None)
            assert worst is None or all((x.priority, x.key) > worst for x in shed)
            assert {id(x) for x in after} == {id(x) for x in before if x not in shed} | {id(w)}


@pytest.mark.parametrize("name", ORDERS)
def test_nobody_starves_while_others_keep_coming(name: str) -> None:
    """One request at each of the worst places; better ones arrive as fast as they are served."""
    order, queue = Order(name, priority_s=2.0), WaitingQueue[Waiting](1000, 10**9)
    unlucky = Waiting(request_id="unlucky", tenant="a", priority=5, tokens=400, arrived_s=0.0, deadline_s=60.0)
    order.enter(unlucky)
    queue.add(unlucky)
    for i in range(3000):
        now_s = i / 10
        better = Waiting(
            request_id=str(i), tenant=f"t{i % 7}", priority=0, tokens=100, arrived_s=now_s, deadline_s=now_s + 0.5
        )
        order.enter(better)
        queue.add(better)
        served = next(iter(queue))
        queue.remove(served)
        order.left(served)
        if served is unlucky:
            assert now_s <= 61
            return
    raise AssertionError(f"{name}: it still waits")


def served_tokens(order: Order, weights: dict[str, float], sizes: dict[str, list[int]], rounds: int) -> dict[str, int]:
    """Tenants that always have three requests waiting; one is served at a time."""
    queue = WaitingQueue[Waiting](1000, 10**9)
    served = dict.fromkeys(weights, 0)
    count = 0

    def arrive(tenant: str) -> None:
        nonlocal count
        own = sizes[tenant]
        w = Waiting(request_id=str(count), tenant=tenant, tokens=own[count % len(own)])
        count += 1
        order.enter(w)
        queue.add(w)

    for tenant in weights:
        for _ in range(3):
            arrive(tenant)
    for _ in range(rounds):
        w = next(iter(queue))
        queue.remove(w)
        order.left(w)
        served[w.tenant] += w.tokens
        arrive(w.tenant)
    return served


@untimed
@given(
    weights=st.tuples(st.floats(0.5, 4), st.floats(0.5, 4), st.floats(0.5, 4)),
    sizes=st.lists(st.lists(st.integers(1, 500), min_size=1, max_size=5), min_size=3, max_size=3),
)
def test_tenants_get_tokens_by_weight_within_one_request_of_each(
    weights: tuple[float, ...], sizes: list[list[int]]
) -> None:
    """The bound of start-time fair queueing for tenants that always wait."""
    by_tenant = dict(zip("abc", weights, strict=True))
    own = dict(zip("abc", sizes, strict=True))
    served = served_tokens(Order("fair", weights=by_tenant), by_tenant, own, 300)
    for one in "abc":
        for other in "abc":
            apart = served[one] / by_tenant[one] - served[other] / by_tenant[other]
            assert apart <= max(own[one]) / by_tenant[one] + max(own[other]) / by_tenant[other] + 1e-6


def test_a_tenant_that_floods_delays_another_by_one_request_not_by_its_flood() -> None:
    order, queue = Order("fair"), WaitingQueue[Waiting](1000, 10**9)
    for i in range(500):
        w = Waiting(request_id=f"flood-{i}", tenant="flood", tokens=100)
        order.enter(w)
        queue.add(w)
    calm = Waiting(request_id="calm", tenant="calm", tokens=100)
    order.enter(calm)
    queue.add(calm)
    assert [w.request_id for w in queue].index("calm") <= 1


def test_a_full_queue_sheds_the_flood_not_the_newcomer() -> None:
    order, queue = Order("fair"), WaitingQueue[Waiting](10, 10**9)
    for i in range(10):
        w = Waiting(request_id=f"flood-{i}", tenant="flood", tokens=100)
        order.enter(w)
        queue.add(w)
    calm = Waiting(request_id="calm", tenant="calm", tokens=100)
    order.enter(calm)
    assert [w.request_id for w in queue.add(calm)] == ["flood-9"]


def test_a_tenant_pays_for_what_was_served_not_for_what_was_shed_and_for_its_answers() -> None:
    order = Order("fair")
    first, shed, second = (Waiting(request_id=x, tenant="a", tokens=100) for x in "123")
    order.enter(first)
    order.enter(shed)
    order.withdrawn(shed)
    order.enter(second)
    assert (first.key[0], second.key[0]) == (0.0, 100.0)
    order.charge("a", 50)
    after, other = Waiting(request_id="4", tenant="a"), Waiting(request_id="5", tenant="b")
    order.enter(after)
    order.enter(other)
    assert (after.key[0], other.key[0]) == (250.0, 0.0)


def test_tags_of_many_tenants_do_not_pile_up() -> None:
    order = Order("fair")
    for i in range(3 * MAX_TENANTS):
        w = Waiting(request_id=str(i), tenant=str(i), tokens=1)
        order.enter(w)
        order.left(w)
    assert len(order._last_tag) <= MAX_TENANTS + 1


def test_a_low_priority_is_shed_first_and_one_alone_may_be_longer_than_the_bound() -> None:
    queue, order = WaitingQueue[Waiting](2, 100), Order("priority")
    long = Waiting(request_id="long", tokens=500, priority=9)
    order.enter(long)
    assert queue.add(long) == []
    good = Waiting(request_id="good", tokens=10, priority=0)
    order.enter(good)
    assert queue.add(good) == [long]
    worse = Waiting(request_id="worse", tokens=95, priority=1)
    order.enter(worse)
    assert queue.add(worse) == [worse]
