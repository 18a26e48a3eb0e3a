"""What the engine tells of its layers: grouped by time, none left out, the last ones at once."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from kvstore.transfer.progress import MAX_MESSAGE_BYTES, Chunk, LayersDone, Progress, ProgressSender, StepEnds, decode

LAYERS = 10
GROUP_S = 0.008


class Engine:
    def __init__(self) -> None:
        ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._theirs.setblocking(False)
        self.sender = ProgressSender(ours.detach(), LAYERS, group_s=GROUP_S)

    def step(self, number: int, layer_s: float, begun_s: float = 0.0) -> None:
        self.sender.begin(number, [Chunk("a", 0, 1, True)])
        for layer in range(LAYERS):
            self.sender.layer(number, layer, begun_s + (layer + 1) * layer_s)
        self.sender.end(number, begun_s + LAYERS * layer_s)

    def fill(self) -> None:
        """Nothing more can be sent."""
        self.sender.begin(0, [Chunk("x" * 60000, 0, 1, True)])
        while self.sender._send([9, "x" * 60000], wait=False):
            pass

    def close(self) -> None:
        self.sender._socket.close()
        self._theirs.close()

    def told(self) -> list[Progress]:
        messages = []
        while True:
            try:
                data = self._theirs.recv(MAX_MESSAGE_BYTES)
            except BlockingIOError:
                return messages
            messages.append(decode(data))


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    made.close()


def layers_of(messages: list[Progress]) -> list[list[int]]:
    return [list(range(m.first, m.first + len(m.at_s))) for m in messages if isinstance(m, LayersDone)]


def test_slow_layers_are_told_one_by_one(engine: Engine) -> None:
    engine.step(1, layer_s=0.01)
    assert layers_of(engine.told()) == [[layer] for layer in range(LAYERS)]


def test_fast_layers_share_messages_and_the_last_two_do_not_wait(engine: Engine) -> None:
    engine.step(1, layer_s=0.003)
    messages = engine.told()
    assert layers_of(messages) == [[0], [1, 2, 3], [4, 5, 6], [7, 8], [9]]
    assert isinstance(messages[-1], StepEnds)


def test_each_layer_keeps_its_own_time(engine: Engine) -> None:
    engine.step(1, layer_s=0.003, begun_s=5.0)
    times = [s for m in engine.told() if isinstance(m, LayersDone) for s in m.at_s]
    assert times == [5.0 + (layer + 1) * 0.003 for layer in range(LAYERS)]


def test_layers_that_could_not_be_told_go_with_the_next_and_never_into_another_step(engine: Engine) -> None:
    engine.sender._wait_s = 0.0
    engine.fill()
    engine.step(1, layer_s=0.01)
    while True:
        try:
            engine._theirs.recv(1 << 20)
        except BlockingIOError:
            break
    engine.step(2, layer_s=0.01, begun_s=1.0)
    assert layers_of(engine.told()) == [[layer] for layer in range(LAYERS)]
