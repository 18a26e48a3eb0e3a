"""Attach loses nothing and doubles nothing, as long as the router comes back in time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from services.protocol.proto import worker_pb2
from services.worker import attach
from services.worker.attach import AttachHub

ROUTER = ("router", "e1")


class Rig:
    def __init__(self) -> None:
        self.now = 0.0
        self.step = 7
        self.lost: list[tuple[str, str]] = []
        self.hub = AttachHub(
            lambda: worker_pb2.Registration(worker_id="w", epoch="we"),
            lambda: worker_pb2.Load(step=self.step),
            self.lost.append,
            lambda: self.now,
        )

    def output(self, position: int) -> None:
        self.hub.add_output(ROUTER, worker_pb2.Output(request_id="r", position=position, token_ids=[position]))


class Router:
    """The other end of one stream."""

    def __init__(self, hub: AttachHub, last_seq: int = 0, epoch: str = "e1") -> None:
        self._acks: asyncio.Queue[worker_pb2.RouterMessage | None] = asyncio.Queue()
        self.ack(last_seq, epoch)
        self._stream = hub.serve(self._requests())

    def ack(self, last_seq: int, epoch: str = "e1") -> None:
        self._acks.put_nowait(worker_pb2.RouterMessage(router_id="router", router_epoch=epoch, last_seq=last_seq))

    async def next(self) -> worker_pb2.WorkerMessage:
        return await asyncio.wait_for(anext(self._stream), 5)

    async def hang_up(self) -> None:
        await self._stream.aclose()

    async def _requests(self) -> AsyncIterator[worker_pb2.RouterMessage]:
        while (message := await self._acks.get()) is not None:
            yield message


async def test_the_first_message_introduces_the_worker_and_is_not_numbered() -> None:
    rig = Rig()
    router = Router(rig.hub)
    first = await router.next()
    assert (first.registration.worker_id, first.seq, first.load.step, first.epoch) == ("w", 0, 7, "we")
    await router.hang_up()


async def test_what_one_step_produced_is_one_message() -> None:
    rig = Rig()
    router = Router(rig.hub)
    await router.next()
    for position in range(3):
        rig.output(position)
    rig.hub.flush()
    rig.output(3)
    rig.hub.flush()
    one, two = await router.next(), await router.next()
    assert [[o.position for o in m.outputs] for m in (one, two)] == [[0, 1, 2], [3]]
    assert (one.seq, two.seq) == (1, 2)
    await router.hang_up()


async def test_a_router_that_comes_back_gets_exactly_what_it_has_not_seen() -> None:
    rig = Rig()
    router = Router(rig.hub)
    await router.next()
    for position in range(5):
        rig.output(position)
        rig.hub.flush()
    for _ in range(4):
        await router.next()
    await router.hang_up()
    rig.output(5)
    rig.hub.flush()
    again = Router(rig.hub, last_seq=2)
    await again.next()
    assert [(await again.next()).outputs[0].position for _ in range(4)] == [2, 3, 4, 5]
    await again.hang_up()
    assert rig.lost == []


async def test_output_before_the_first_attach_waits_for_it() -> None:
    rig = Rig()
    rig.output(0)
    rig.hub.flush()
    router = Router(rig.hub)
    await router.next()
    assert (await router.next()).outputs[0].position == 0
    await router.hang_up()


async def test_a_detached_router_is_lost_after_the_grace_and_not_before() -> None:
    rig = Rig()
    router = Router(rig.hub)
    await router.next()
    rig.hub.sweep()
    rig.now = 1e6  # attached however long
    rig.hub.sweep()
    assert rig.lost == []
    await router.hang_up()
    rig.now += attach.GRACE_S - 1
    rig.hub.sweep()
    assert rig.lost == []
    rig.now += 2
    rig.hub.sweep()
    assert rig.lost == [ROUTER]


async def test_a_new_epoch_of_a_router_ends_the_requests_of_the_old_one_at_once() -> None:
    rig = Rig()
    old = Router(rig.hub)
    await old.next()
    new = Router(rig.hub, epoch="e2")
    await new.next()
    assert rig.lost == [ROUTER]
    with pytest.raises(StopAsyncIteration):
        await old.next()
    await new.hang_up()


async def test_a_router_that_never_acknowledges_is_lost_at_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach, "MAX_KEPT", 10)
    rig = Rig()
    router = Router(rig.hub)
    await router.next()
    for position in range(11):
        rig.output(position)
        rig.hub.flush()
    assert rig.lost == [ROUTER]


async def test_acknowledged_messages_are_let_go() -> None:
    rig = Rig()
    router = Router(rig.hub)
    await router.next()
    rig.output(0)
    rig.hub.flush()
    await router.next()
    assert not rig.hub.drained
    router.ack(1)
    async with asyncio.timeout(5):
        while not rig.hub.drained:
            await asyncio.sleep(0)
    await router.hang_up()


async def test_a_router_that_saw_more_than_a_new_outbox_holds_gets_what_is_there() -> None:
    rig = Rig()
    rig.output(0)
    rig.hub.flush()
    router = Router(rig.hub, last_seq=40)
    await router.next()
    rig.output(1)
    rig.hub.flush()
    assert (await router.next()).seq == 2
    await router.hang_up()


async def test_closing_sends_what_is_buffered_and_ends_the_stream() -> None:
    rig = Rig()
    router = Router(rig.hub)
    await router.next()
    rig.output(0)
    rig.hub.close()
    assert (await router.next()).outputs[0].position == 0
    with pytest.raises(StopAsyncIteration):
        await router.next()


async def test_a_load_that_is_news_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach, "LOAD_EVERY_S", 1000.0)
    rig = Rig()
    router = Router(rig.hub)
    await router.next()
    rig.hub.tell_load()
    told = await router.next()
    assert (told.seq, told.load.step, len(told.outputs)) == (0, 7, 0)
    await router.hang_up()


async def test_no_older_load_follows_a_newer_one() -> None:
    rig = Rig()
    router = Router(rig.hub)
    await router.next()
    rig.output(0)
    await asyncio.sleep(0)  # flushed: it is on its way
    rig.step = 8
    rig.hub.tell_load()
    told = [await router.next() for _ in range(2)]
    assert [len(m.outputs) for m in told] == [1, 0]
    assert [m.load.step for m in told] == [8, 8]
    await router.hang_up()
