"""The engine's process over its pipe: real memory, real messages, a tiny model."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.geometry import KVGeometry
from kvstore.process import Child
from kvstore.tensors import KVMemory
from kvstore.transfer import progress
from services.config import EngineConfig
from services.engine.child import EXIT_REFUSED, child_config
from services.engine.messages import (
    CODEC,
    AbortSequence,
    EngineReady,
    GetSteps,
    PrefillStarted,
    ReleaseSequence,
    Reserved,
    ReserveRefused,
    ReserveSequence,
    Sampling,
    SequenceOutput,
    StartSequence,
    StepDone,
    Steps,
    Stop,
)
from services.engine.shape import kv_geometry
from services.protocol.model_card import ModelCard
from tests.engine_harness import sequence

WAIT_S = 60.0
ENGINE = EngineConfig(num_blocks=64, max_num_batched_tokens=32, num_threads=1)


class Worker:
    """The service process's side of one engine child."""

    def __init__(self, folder: Path, card: ModelCard, role: str, **config: Any) -> None:
        self.card = card
        self.geometry = kv_geometry(card, ENGINE, "float32")
        self.memory = KVMemory.create(self.geometry)
        self.messages: list[Any] = []
        self.exit_code: int | None = None
        self._news = asyncio.Event()
        self.child = Child(CODEC, self._take, self._ended, f"engine-{role}")
        self.layers, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.layers.settimeout(WAIT_S)
        self.config = child_config(
            folder=folder,
            role=role,
            dtype="float32",
            max_model_len=512,
            engine=ENGINE,
            geometry=self.geometry,
            **config,
        )

    async def start(self) -> None:
        fds = (self.memory.fd, self._theirs.fileno())
        await self.child.start("services.engine.child", [str(fds[0]), str(fds[1]), self.config], pass_fds=fds)
        self._theirs.close()

    async def until(self, found: Callable[[], Any], timeout_s: float = WAIT_S) -> Any:
        """The first true value of ``found``, asked after each message and at the child's end."""
        async with asyncio.timeout(timeout_s):
            while not (value := found()):
                self._news.clear()
                await self._news.wait()
        return value

    async def first(self, kind: type) -> Any:
        return await self.until(lambda: next((m for m in self.messages if isinstance(m, kind)), None))

    def outputs(self, seq_id: str) -> list[SequenceOutput]:
        steps = (m for m in self.messages if isinstance(m, StepDone))
        return [o for m in steps for o in m.outputs if o.seq_id == seq_id]

    def tokens(self, seq_id: str) -> list[int]:
        return [t for o in self.outputs(seq_id) for t in o.token_ids]

    async def ended(self, seq_id: str) -> SequenceOutput:
        return await self.until(lambda: next((o for o in self.outputs(seq_id) if o.finish_reason), None))

    async def close(self) -> None:
        await self.child.stop(5)
        self.layers.close()
        self.memory.close()

    def _take(self, message: Any) -> None:
        self.messages.append(message)
        self._news.set()

    def _ended(self, code: int) -> None:
        self.exit_code = code
        self._news.set()


@pytest.fixture
async def workers(tiny_model_folder: Path) -> AsyncIterator[Callable[..., Any]]:
    """Starts engine children and ends them."""
    started: list[Worker] = []

    async def start(role: str = "mixed", **config: Any) -> Worker:
        worker = Worker(config.pop("folder", tiny_model_folder), ModelCard.load(tiny_model_folder), role, **config)
        started.append(worker)
        await worker.start()
        return worker

    yield start
    for worker in started:
        await worker.close()


PROMPT = [(7 * i + 11) % 500 + 3 for i in range(75)]
GREEDY = Sampling(max_tokens=12, ignore_eos=True)


async def test_an_engine_announces_itself_answers_and_ends_when_told(workers: Any) -> None:
    worker = await workers()
    ready: EngineReady = await worker.first(EngineReady)
    assert ready.pid == worker.child.pid
    assert (ready.num_blocks, ready.dtype, ready.vocab_size, ready.max_model_len) == (64, "float32", 512, 512)
    assert KVGeometry.from_dict(ready.geometry) == worker.geometry

    os.kill(ready.pid, signal.SIGINT)  # Ctrl-C is for the service process, which drains
    worker.child.send(sequence("a", PROMPT, sampling=GREEDY))
    end = await worker.ended("a")
    assert end.finish_reason == "length"
    assert len(worker.tokens("a")) == 12
    stats = [m for m in worker.messages if isinstance(m, StepDone)][-1].stats
    assert stats.prompt_tokens_computed == 75
    assert stats.decode_tokens_forwarded == 11
    assert stats.blocks_cached == (75 + 11) // 16

    worker.child.send(GetSteps(last=100))
    steps: Steps = await worker.first(Steps)
    assert '"prefill_tokens": 32' in steps.json
    worker.child.send(Stop())
    await worker.until(lambda: worker.exit_code is not None)
    assert worker.exit_code == 0


async def test_kv_copied_between_two_engines_continues_the_same_text(workers: Any) -> None:
    whole, writer, reader = await workers("mixed"), await workers("prefill"), await workers("decode")
    whole.child.send(sequence("a", PROMPT, sampling=GREEDY))
    await whole.ended("a")

    writer.child.send(sequence("a", PROMPT, sampling=GREEDY, hand_off=True))
    source: PrefillStarted = await writer.first(PrefillStarted)
    reader.child.send(ReserveSequence(sequence=sequence("a", PROMPT, sampling=GREEDY)))
    grant: Reserved = await reader.first(Reserved)
    assert len(grant.block_ids) == len(source.block_ids) == 5
    await writer.until(lambda: writer.tokens("a"))
    for layer in range(writer.card.num_layers):
        for ours, theirs in zip(source.block_ids, grant.block_ids, strict=True):
            reader.memory.block(0, layer, theirs)[:] = writer.memory.block(0, layer, ours)
    reader.child.send(StartSequence(seq_id="a", first_tokens=((0, writer.tokens("a")[0]),)))
    end = await reader.ended("a")

    assert reader.tokens("a") == whole.tokens("a")
    assert reader.outputs("a")[0].position == 0
    assert end.finish_reason == "length"
    stats = [m for m in reader.messages if isinstance(m, StepDone)][-1].stats
    assert stats.prompt_tokens_computed == 0
    assert stats.tokens_forwarded == stats.decode_tokens_forwarded == 11
    held = [m for m in writer.messages if isinstance(m, StepDone)][-1].stats
    assert held.blocks_used == 5
    writer.child.send(ReleaseSequence(seq_id="a"))
    await writer.until(lambda: [m for m in writer.messages if isinstance(m, StepDone)][-1].stats.blocks_used == 0)


async def test_layers_are_reported_in_order_until_the_pipe_ends_and_cover_every_block_once(workers: Any) -> None:
    worker = await workers("prefill")
    worker.child.send(sequence("a", PROMPT, sampling=GREEDY, hand_off=True))
    await worker.until(lambda: worker.tokens("a"))
    await worker.child.stop(WAIT_S)
    assert worker.exit_code == 0
    seen: list[Any] = []
    while data := worker.layers.recv(progress.MAX_MESSAGE_BYTES):
        seen.append(progress.decode(data))
    begins = [m for m in seen if isinstance(m, progress.StepBegins)]
    assert [m.step for m in seen if isinstance(m, progress.StepEnds)] == [m.step for m in begins]
    blocks = [b for m in begins for c in m.chunks for b in range(c.first, c.first + c.count)]
    assert blocks == [0, 1, 2, 3, 4]
    assert [c.is_last for m in begins for c in m.chunks] == [False, False, True]
    for begin in begins:
        told = [m for m in seen if isinstance(m, progress.LayersDone) and m.step == begin.step]
        assert [m.first + i for m in told for i in range(len(m.at_s))] == [0, 1]


async def test_what_is_wrong_with_one_request_ends_that_request_alone(workers: Any) -> None:
    worker = await workers()
    worker.child.send(sequence("long", PROMPT, sampling=Sampling(max_tokens=400, ignore_eos=True)))
    worker.child.send(sequence("foreign", [3, 999], sampling=GREEDY))
    worker.child.send(sequence("empty-nucleus", [3, 4], sampling=Sampling(top_p=0.0)))
    worker.child.send(ReserveSequence(sequence=sequence("too-long", [3] * 600, sampling=GREEDY)))
    worker.child.send(sequence("good", PROMPT, sampling=GREEDY))
    assert (await worker.ended("foreign")).error_code == "invalid_request"
    assert (await worker.ended("empty-nucleus")).error_code == "invalid_request"
    refused: ReserveRefused = await worker.first(ReserveRefused)
    assert (refused.seq_id, refused.code) == ("too-long", "context_length_exceeded")
    assert (await worker.ended("good")).finish_reason == "length"
    worker.child.send(AbortSequence(seq_id="long"))
    assert (await worker.ended("long")).finish_reason == "abort"


async def test_a_refused_model_ends_the_process_with_its_own_code(workers: Any, tmp_path: Path) -> None:
    worker = await workers(folder=tmp_path)
    await worker.until(lambda: worker.exit_code is not None)
    assert worker.exit_code == EXIT_REFUSED


async def test_a_hanging_engine_can_be_made_for_those_who_watch_it(workers: Any) -> None:
    worker = await workers(hang_after_step=3)
    worker.child.send(sequence("a", [3, 4, 5], sampling=Sampling(max_tokens=50, ignore_eos=True)))
    await worker.until(lambda: len(worker.tokens("a")) == 3)
    worker.child.send(GetSteps(last=1))
    with pytest.raises(TimeoutError):
        await worker.until(lambda: len(worker.tokens("a")) > 3 or worker.exit_code is not None, timeout_s=0.5)
    os.kill(worker.child.pid, signal.SIGKILL)
    await worker.until(lambda: worker.exit_code is not None)
    assert worker.exit_code == -signal.SIGKILL
