"""Runs each fault once, however many cells look at it, in a world that is opened when it is first needed."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path

from tests import prompts
from tests.integration.matrix import network
from tests.integration.matrix.experiment import AFTER, DURING, Fault, Result, run
from tests.integration.matrix.phases import PROMPTS, SHAPES
from tests.integration.matrix.world import World


class Lab:
    """``folder`` makes a new folder by a name. `close` it at the end; raises what the last world breaks."""

    def __init__(self, model: Path, folder: Callable[[str], Path]) -> None:
        self.no_network = network.why_not()
        self.results: dict[Fault, Result] = {}
        self._model = model
        self._folder = folder
        self._world: World | None = None
        self._failed: dict[Fault, Exception] = {}
        self._tags = itertools.count()

    def result(self, fault: Fault) -> Result:
        """What the fault did. Raises what went wrong before it struck, each time again."""
        if fault in self._failed:
            raise self._failed[fault]
        if fault not in self.results:
            try:
                self.results[fault] = asyncio.run(self._run(fault))
            except Exception as exc:
                self._failed[fault] = exc
                raise
        return self.results[fault]

    def text(self, phase: str) -> str:
        """What the request of this phase answers where nothing fails: transformers' own greedy tokens, in fp32."""
        like = "committed" if phase in (DURING, AFTER) else phase
        num_tokens = 8 if phase in (DURING, AFTER) else SHAPES[phase].max_tokens
        ids = prompts.greedy(self._model, PROMPTS[like], num_tokens)
        return prompts.text(self._model, ids)

    def close(self) -> None:
        if self._world is not None:
            world, self._world = self._world, None
            asyncio.run(world.close())

    async def _run(self, fault: Fault) -> Result:
        world = await self._ready_world(fault.pairs)
        try:
            result = await run(world, fault, str(next(self._tags)))
        finally:
            if not await world.is_whole():
                await self._discard()
        return result

    async def _ready_world(self, pairs: int) -> World:
        if self._world is not None and self._world.pairs != pairs:
            world, self._world = self._world, None
            await world.close()
        if self._world is None:
            world = World(self._folder(f"matrix-{pairs}"), self._model, pairs, not self.no_network)
            self._world = await world.open()
        return self._world

    async def _discard(self) -> None:
        """A world that is not itself again: what is wrong stands in the result, the next fault gets a new one."""
        world, self._world = self._world, None
        if world is None:
            return
        try:
            await world.close()
        except (AssertionError, OSError):
            return
