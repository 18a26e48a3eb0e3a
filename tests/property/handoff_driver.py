"""Random lives of a `HandoffWorld`, drawn so that most requests get somewhere before something happens to them."""

from __future__ import annotations

import random
from typing import Any

from tests.property.handoff_wire import Weather
from tests.property.handoff_world import Calls, HandoffWorld

PROMPTS = [[1, 2, 3], [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6], list(range(20, 36)), list(range(7, 30))]
WEATHERS = [
    Weather(),
    Weather(fails=0.3),
    Weather(sticks=0.3),
    Weather(fails=0.2, sticks=0.2, is_confirming=False),
    Weather(damages=0.1),
    Weather(slow_s=1.5, is_confirming=False),
]
CALLS = [Calls(), Calls(lost=0.3), Calls(unanswered=0.3), Calls(late=0.3), Calls(0.15, 0.15, 0.15, delay_s=0.8)]
DECODERS = ["D0", "D1"]
LENGTHS, BUDGETS_MS = [1, 4, 12], [300, 3_000, 20_000]
WAITS_S = [0.005, 0.02, 0.05, 0.2, 1.0, 3.0, 7.0]


def submit(world: HandoffWorld, prompt: list[int], decode: str, max_tokens: int, remaining_ms: int) -> None:
    if world.nodes["P"].is_alive and world.nodes[decode].is_alive:
        world.submit(prompt, decode, max_tokens, remaining_ms)


def next_turn(world: HandoffWorld, pick: int, decode: str) -> None:
    """A conversation goes on: the decode worker of the turn before is asked for the KV of all but the new words."""
    before = [a for a in world.attempts.values() if a.tokens and len(a.prompt) < 30]
    if before:
        turn = before[pick % len(before)]
        prompt = [*turn.prompt, *(turn.tokens[i] for i in sorted(turn.tokens)), 3, 4, 5]
        if world.nodes["P"].is_alive and world.nodes[decode].is_alive and world.nodes[turn.decode].is_alive:
            world.submit(prompt, decode, 4, 20_000, source=turn.decode)


def abort(world: HandoffWorld, pick: int, where: str) -> None:
    if world.attempts and world.nodes[where].is_alive:
        world.abort(sorted(world.attempts)[pick % len(world.attempts)], where)


def retarget(world: HandoffWorld, pick: int, decode: str) -> None:
    waiting = [a.request_id for a in world.attempts.values() if a.failed_over]
    if waiting and world.nodes["P"].is_alive and world.nodes[decode].is_alive:
        world.retarget(waiting[pick % len(waiting)], decode)


def cut(world: HandoffWorld, decode: str, *, is_cut: bool) -> None:
    (world.cuts.add if is_cut else world.cuts.discard)(frozenset(("P", decode)))


def deliver_again(world: HandoffWorld, pick: int) -> None:
    recent = world.recent()
    if recent:
        world.do(lambda: world.deliver(*recent[pick % len(recent)]))


def end_or_start(world: HandoffWorld, where: str) -> None:
    node = world.nodes[where]
    world.do(node.crash if node.is_alive else node.start)


def live(seed: int, steps: int = 60) -> tuple[int, set[tuple[str, str]]]:
    """Commits and (side, arrow) seen in one random life that ends well. Raises AssertionError where it does not."""
    rng = random.Random(seed)
    world = HandoffWorld(seed, asks_once=rng.random() < 0.5)
    try:
        for _ in range(steps):
            _step(world, rng)
            world.check()
        world.settle()
        return world.commits, world.arrows
    finally:
        world.close()


def _step(world: HandoffWorld, rng: random.Random) -> None:
    pick, decode, where = rng.randrange(64), rng.choice(DECODERS), rng.choice(list(world.nodes))
    acts: list[tuple[int, Any]] = [
        (25, lambda: submit(world, rng.choice(PROMPTS), decode, rng.choice(LENGTHS), rng.choice(BUDGETS_MS))),
        (12, lambda: next_turn(world, pick, decode)),
        (35, lambda: world.run_for(rng.choice(WAITS_S))),
        (8, lambda: abort(world, pick, where)),
        (8, lambda: retarget(world, pick, decode)),
        (6, lambda: setattr(world, "weather", rng.choice(WEATHERS))),
        (5, lambda: setattr(world, "calls", rng.choice(CALLS))),
        (3, lambda: cut(world, decode, is_cut=rng.random() < 0.5)),
        (4, lambda: deliver_again(world, pick)),
        (3, world.nodes[where].kill_transfer),
        (3, lambda: end_or_start(world, where)),
    ]  # fmt: skip
    rng.choices([act for _, act in acts], [weight for weight, _ in acts])[0]()
