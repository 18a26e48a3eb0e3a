"""One fault on one worker while five requests are in five phases; what became of each, and of the workers."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from services.protocol.errors import RequestError
from tests.integration.matrix.calls import SLACK_S, Call
from tests.integration.matrix.phases import PROMPTS, TRIES, Missed, Stage
from tests.integration.matrix.world import FIRST_TOKEN_S, LEASE_S, TOTAL_S, World

FAULTS = ("kill", "stop", "cut", "restart")
STOP_S = LEASE_S + 5
IDLE_S = 10.0
AFTER = "after"  # a request that is sent when all is over
DURING = "during"  # a request that comes right after the fault


@dataclass(frozen=True, slots=True)
class Fault:
    """``seconds``: how long a worker stands still or is cut off; 0 where that does not apply."""

    kind: str
    side: str  # P or D
    pairs: int
    seconds: float = 0.0

    @property
    def name(self) -> str:
        pairs = "one pair" if self.pairs == 1 else "two pairs"
        return f"{self.side} {self.kind} {f'{self.seconds:g} s ' if self.kind == 'stop' else ''}{pairs}"

    @property
    def id(self) -> str:
        return "-".join((self.side, self.kind + (f"{self.seconds:g}" if self.kind == "stop" else ""), str(self.pairs)))


@dataclass(slots=True)
class Result:
    """What became of the requests, by phase; `during` and `after` among them."""

    fault: Fault
    calls: dict[str, Call] = field(default_factory=dict)
    others: list[Call] = field(default_factory=list)
    timelines: dict[str, dict[str, Any]] = field(default_factory=dict)
    missed: list[str] = field(default_factory=list)  # tries that did not bring every request into its phase
    hung: list[str] = field(default_factory=list)
    rungs: dict[str, int] = field(default_factory=dict)  # how often the router counted each, over the whole fault
    idle_s: float | None = None  # from the last answer, or the victim's return, until every block was idle
    problem: str = ""  # what does not hold of the workers afterwards


async def run(world: World, fault: Fault, tag: str) -> Result:
    """Raises Missed where the phases could not be reached; anything else that goes wrong is in the result."""
    pair = ("prefill-0", "decode-0")
    victim = pair[0] if fault.side == "P" else pair[1]
    result = Result(fault)
    async with httpx.AsyncClient(timeout=TOTAL_S + 2 * SLACK_S, limits=httpx.Limits(max_connections=None)) as client:
        stage = await _reach(world, client, pair, victim, f"{fault.id}-{tag}", result)
        result.calls, result.others = stage.calls, stage.others
        before = await _rungs(world, client)
        struck_s = time.monotonic()
        _strike(world, fault, victim)
        stage.release()
        during = Call(f"{stage.salt}-{DURING}", PROMPTS["committed"], 8, False, f"{stage.salt}-{DURING}")
        result.calls[DURING] = during.start(world.cluster.url, client)
        healing = asyncio.create_task(_end_fault(world, fault, victim, struck_s))
        await _ends(result)
        await healing
        after = await _rungs(world, client)
        result.rungs = {rung: count - before.get(rung, 0) for rung, count in after.items()}
        if result.rungs.get("compute_here"):
            world.cluster.check_decode_computes_nothing = False
        await _aftermath(world, result, client, stage.salt)
    return result


async def _reach(
    world: World, client: httpx.AsyncClient, pair: tuple[str, str], victim: str, salt: str, result: Result
) -> Stage:
    """All five requests in their phases, the victim at a standstill, the other worker's engine too."""
    for number in range(TRIES):
        stage = Stage(world, client, pair, victim, f"{salt}-{number}")
        try:
            await stage.set_up()
            await stage.still()
            await stage.check()
            return stage
        except Missed as miss:
            result.missed.append(str(miss))
            world.thaw(victim)
            stage.release()
            for call in [*stage.calls.values(), *stage.others]:
                await call.end(TOTAL_S + SLACK_S)
            try:
                await world.cluster.idle(IDLE_S)
            except AssertionError as exc:
                stories = [story(call, await stage.told(call.label)) for call in stage.calls.values()]
                raise AssertionError("\n".join([f"nothing was harmed ({miss})", str(exc), *stories])) from None
    raise Missed(f"in {TRIES} tries: {result.missed}")


def _strike(world: World, fault: Fault, victim: str) -> None:
    """The victim stands still already."""
    if fault.kind in ("kill", "restart"):
        world.kill(victim)
    if fault.kind == "restart":
        world.cluster.start_worker(victim)
    if fault.kind == "cut":
        world.cut(victim)
        world.thaw(victim)


async def _end_fault(world: World, fault: Fault, victim: str, struck_s: float) -> None:
    if fault.kind in ("stop", "cut"):
        await asyncio.sleep(max(0.0, struck_s + fault.seconds - time.monotonic()))
    if fault.kind == "stop":
        world.thaw(victim)
    if fault.kind == "cut":
        world.mend(victim)


async def _ends(result: Result) -> None:
    """Wait for every request, no longer than its budget allows."""
    for call in [*result.calls.values(), *result.others]:
        left_s = call.sent_s + TOTAL_S + SLACK_S - time.monotonic()
        try:
            await call.end(max(left_s, 0.1))
        except TimeoutError:
            result.hung.append(call.label)


async def _rungs(world: World, client: httpx.AsyncClient) -> dict[str, int]:
    text = (await client.get(f"{world.cluster.url}/metrics")).text
    return {
        name: int(float(value)) for name, value in re.findall(r'^pdray_rungs_total{rung="(\w+)"} (\S+)$', text, re.M)
    }


async def _aftermath(world: World, result: Result, client: httpx.AsyncClient, salt: str) -> None:
    cluster = world.cluster
    for phase, call in result.calls.items():
        result.timelines[phase] = await cluster.debug(call.label)
    ended_s = time.monotonic()
    try:
        await cluster.idle(IDLE_S)  # of the workers that are there
        await world.heal()
        ended_s = max(ended_s, time.monotonic()) if result.fault.kind != "stop" else ended_s
        rows = await cluster.idle(IDLE_S)
        result.idle_s = time.monotonic() - ended_s
        cluster.check(rows)
        call = Call(f"{salt}-{AFTER}", PROMPTS["committed"], 8, True, f"{salt}-{AFTER}").start(cluster.url, client)
        result.calls[AFTER] = call
        await call.end(FIRST_TOKEN_S)
        result.timelines[AFTER] = await cluster.debug(call.label)
        await cluster.idle(IDLE_S)
    except (AssertionError, TimeoutError, httpx.HTTPError, RequestError) as exc:
        stories = [story(result.calls[phase], told) for phase, told in result.timelines.items()]
        result.problem = "\n".join([f"{type(exc).__name__}: {exc}", *stories])


def story(call: Call, told: dict[str, Any]) -> str:
    """What a request went through, for a failure's message."""
    attempts = [(a["kind"], a["prefill"], a["decode"], a["at_ms"]) for a in told["attempts"]]
    events = [_line(event) for event in told["events"]]
    return "\n".join([str(call), call.text[-200:], str(attempts), *events])


def _line(event: dict[str, Any]) -> str:
    detail = {k: v for k, v in event.get("detail", {}).items() if k != "layers"}
    return f"{event['at_ms']:.0f} {event['name']} {event.get('worker', '')} {event.get('attempt', '')} {detail}"


def rung_of(told: dict[str, Any]) -> str:
    """The last thing that the router did for this request; "none" where its first attempt served."""
    kinds = [attempt["kind"] for attempt in told["attempts"]]
    if len(kinds) <= 1:
        return "none"
    return "retry" if kinds[-1] == "submit" else str(kinds[-1])
