"""Brings five requests surely into the five phases of one pair, all at the same time.

    decoding    D gives tokens, the client has some
    committed   D holds the verified KV, has not decoded it yet        D's engine is stopped as soon as it has granted
    transfer    P has given token 1, the KV is on the (slow) wire
    prefill     P computes the prompt                                  P's engine is stopped in the middle of it
    queued      P has accepted the request and not begun it

What a phase is was read from the request's own timeline, with the victim at a standstill; where one was missed, the
requests run to their end and new ones are sent.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.integration.matrix.calls import Call
from tests.integration.matrix.world import World

PHASES = ("queued", "prefill", "transfer", "committed", "decoding")
TRIES = 6
STEP_S = 10.0  # longest wait for a single arrow while nothing is broken
SEEN = 3  # pieces that a decoding request's client has at least


@dataclass(frozen=True, slots=True)
class Shape:
    prompt_tokens: int
    max_tokens: int
    is_stream: bool


SHAPES = {
    "queued": Shape(400, 8, False),
    "prefill": Shape(1600, 8, False),
    "transfer": Shape(1600, 24, True),
    "committed": Shape(480, 48, True),
    "decoding": Shape(100, 1500, True),
}
"""Where nothing was sent yet a failure is an HTTP status, so these do not stream."""


def _prompt(num_tokens: int, seed: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(3, 512) for _ in range(num_tokens))


PROMPTS = {phase: _prompt(shape.prompt_tokens, number) for number, (phase, shape) in enumerate(SHAPES.items(), 1)}


class Missed(Exception):
    """A request was not in its phase any more, or not yet."""


@dataclass
class Stage:
    """The requests of one experiment. ``pair``: where they are sent; ``victim``: the worker of it that will fail."""

    world: World
    client: httpx.AsyncClient
    pair: tuple[str, str]
    victim: str
    salt: str
    calls: dict[str, Call] = field(default_factory=dict)  # by phase
    others: list[Call] = field(default_factory=list)  # sent so that the next turn is the pair's
    last: str = ""  # label of the latest request

    async def set_up(self) -> None:
        """All five are under way; both engines of the pair stand still. Raises Missed."""
        prefill, decode = self.pair
        await self._send("decoding")
        await self._until("decoding", lambda _: self.calls["decoding"].pieces >= SEEN)
        await self._send("committed")
        await self._send("transfer")
        await self._until("transfer", lambda names: "granted" in names)
        self.world.pin(decode)
        await self._send("prefill")
        await self._until("prefill", lambda names: "prefill_started" in names)
        self.world.pin(prefill)
        await self._send("queued")
        await self._until("queued", lambda names: "queued" in names)
        await self._until("committed", lambda names: "committed" in names)

    async def check(self) -> None:
        """Raise Missed unless every request is where it should be."""
        for phase, call in self.calls.items():
            told = await self.told(call.label)
            pair = (told["attempts"][0]["prefill"], told["attempts"][0]["decode"])
            is_phase = phase_of(told, call.pieces)
            if (pair, is_phase) != (self.pair, phase):
                raise Missed(f"{call.label} is at {pair} in phase {is_phase!r}")

    async def still(self) -> None:
        """The victim stands still; what it had sent has arrived."""
        self.world.freeze(self.victim)
        await asyncio.sleep(0.1)

    def release(self) -> None:
        """The other worker of the pair computes again."""
        self.world.unpin(next(name for name in self.pair if name != self.victim))

    async def told(self, label: str) -> dict[str, Any]:
        return await self.world.cluster.debug(label)

    async def _send(self, phase: str) -> None:
        await self._aim()
        shape = SHAPES[phase]
        call = Call(f"{self.salt}-{phase}", PROMPTS[phase], shape.max_tokens, shape.is_stream, self.salt)
        self.calls[phase] = call.start(self.world.cluster.url, self.client)
        self.last = call.label

    async def _aim(self) -> None:
        """Send one-token requests until the next turn is our pair's."""
        if self.world.pairs == 1:
            return
        while not self.last or _turn(await self._first_pair(self.last)) != (_turn(self.pair) - 1) % 4:
            call = Call(f"{self.salt}-filler-{len(self.others)}", PROMPTS["decoding"][:5], 1, False, self.salt)
            self.others.append(call.start(self.world.cluster.url, self.client))
            self.last = call.label

    async def _first_pair(self, label: str) -> tuple[str, str]:
        told = await _until(self._known(label), f"an attempt of {label}")
        return told["attempts"][0]["prefill"], told["attempts"][0]["decode"]

    def _known(self, label: str) -> Callable[[], Awaitable[dict[str, Any] | None]]:
        async def known() -> dict[str, Any] | None:
            reply = await self.client.get(f"{self.world.cluster.url}/debug/requests/{label}", timeout=5)
            told: dict[str, Any] = reply.json() if reply.status_code == 200 else {}
            return told if told.get("attempts") else None

        return known

    async def _until(self, phase: str, is_there: Callable[[set[str]], bool]) -> None:
        call = self.calls[phase]

        async def there() -> dict[str, Any] | None:
            told = await self._known(call.label)()
            if told is None or not is_there({e["name"] for e in told["events"]}):
                return None
            return told

        told = await _until(there, f"{phase} of {call.label}")
        if told["outcome"] != "live":
            raise Missed(f"{call.label} has ended: {told['outcome']}")


async def _until(find: Callable[[], Awaitable[dict[str, Any] | None]], what: str) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + STEP_S
    while loop.time() < deadline:
        if (found := await find()) is not None:
            return found
        await asyncio.sleep(0.002)
    raise Missed(f"{what}: not within {STEP_S:g} s")


def phase_of(told: dict[str, Any], pieces: int) -> str:
    """Of a request that no worker has failed yet, from its timeline and what its client has."""
    if told["outcome"] != "live" or len(told["attempts"]) != 1:
        return ""
    names = {e["name"] for e in told["events"]}
    if "committed" in names:
        return "decoding" if pieces >= SEEN else "committed"
    if "prefill_done" in names:
        return "transfer" if "receiving" in names and "verifying" not in names else ""
    if "prefill_started" in names:
        return "prefill"
    return "queued" if "queued" in names else ""


def _turn(pair: tuple[str, str]) -> int:
    """When round-robin over two prefill and two decode workers comes to this pair: 0, 1, 2 or 3."""
    prefill, decode = (int(name.rpartition("-")[2]) for name in pair)
    return 2 * decode + prefill
