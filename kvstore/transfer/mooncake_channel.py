"""The writing half of the Mooncake transport: gets let in, submits each run under an id of its own, and knows when it
stalls."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
import time
from collections.abc import Mapping, Sequence

from kvstore.errors import SubmitFailed, TransferError
from kvstore.transfer import guard
from kvstore.transfer.base import Region, Write, WriteState, check_source
from kvstore.transfer.mooncake_engine import GuardedEngine
from kvstore.transfer.talk import Talk

ANSWER_S = 5.0
CONFIRM_S = 2.5
STALL_S = 10.0
"""Without any write ending for so long the channel has failed: a lane that lost its connection finds the ports shut."""
_LOOK_S = 1.0
_WARM_BYTES = 4096
_WARM_WRITES = 16
_WARM_ROUNDS = 8
_LOOK_AHEAD = 16  # lanes take writes in order, so what lies behind so many pending ones is pending


class MooncakeChannel:
    """An engine that is connected to one reader's. `submit` is for one thread; `poll` and `close` for any."""

    def __init__(self, region: Region, engine: GuardedEngine, talk: Talk, protocol: str) -> None:
        self._region = region
        self._engine = engine
        self._talk = talk
        self._protocol = protocol
        self._target = ""
        self._memory = 0  # address of the reader's region, in the reader
        self._num_bytes = 0
        self._ports: set[int] = set()
        self._ids = itertools.count(1)
        self._transfers: dict[int, int] = {}  # our id: Mooncake's, while it is pending
        self._refused: set[int] = set()  # ours; they never got a number of Mooncake's
        self._asked: dict[str, bool] = {}  # tickets that the reader was asked about
        self._talking = threading.Lock()  # a question and its answer
        self._is_closing = False
        self._progress_s = 0.0
        self._looked_s = 0.0

    def open(self) -> None:
        """Raises TransferError where the reader does not let us in."""
        try:
            self._engine.open()
            self._enter()
        except (KeyError, TypeError, ValueError) as exc:
            self._abandon()
            raise TransferError(f"the reader's answer makes no sense: {exc!r}") from None
        except BaseException:
            self._abandon()
            raise

    def _enter(self) -> None:
        if self._protocol == "rdma":
            self._engine.register(self._region)
        self._talk.send({"knock": self._protocol})
        answer = self._talk.receive(ANSWER_S)
        self._target, self._memory = str(answer["target"]), int(answer["memory"])
        self._num_bytes, self._ports = int(answer["num_bytes"]), {int(p) for p in answer["ports"]}
        self._warm_up(int(answer["scratch"]))
        self._talk.send({"mine": guard.own_connections(self._ports)})
        if self._talk.receive(ANSWER_S).get("sealed") is not True:
            raise TransferError("the reader did not let us in")

    def _warm_up(self, scratch: int) -> None:
        """Write to the reader's scratch memory until no more lanes come up. Raises TransferError where none does."""
        source = ctypes.create_string_buffer(_WARM_BYTES)
        before = -1
        for _ in range(_WARM_ROUNDS):
            address = ctypes.addressof(source)
            pending = [
                self._engine.submit_write(self._target, address, scratch, _WARM_BYTES) for _ in range(_WARM_WRITES)
            ]
            deadline_s = time.monotonic() + ANSWER_S
            while pending:
                states = {i: self._engine.check_status(i) if i else -1 for i in pending}
                if any(state < 0 for state in states.values()) or time.monotonic() > deadline_s:
                    raise TransferError("mooncake could not write to the reader")
                pending = [i for i, state in states.items() if state == 0]
                time.sleep(0.0005)
            lanes = len(guard.own_connections(self._ports))
            if lanes == 0 and self._protocol == "tcp":
                raise TransferError("mooncake does not keep its connections; set MC_TCP_ENABLE_CONNECTION_POOL=1")
            if lanes == before:
                return
            before = lanes

    def submit(self, writes: Sequence[Write]) -> list[int]:
        check_source(self._region, writes)
        allowed = {ticket: self._is_allowed(ticket) for ticket in {w.ticket_id for w in writes}}
        if not self._transfers:
            self._progress_s = time.monotonic()
        return [self._start(write) if allowed[write.ticket_id] else self._refuse() for write in writes]

    def _start(self, write: Write) -> int:
        source, target = self._region.address + write.source_offset, self._memory + write.target_offset
        transfer = 0
        if write.target_offset >= 0 and write.target_offset + write.num_bytes <= self._num_bytes:
            with contextlib.suppress(TransferError):  # closed meanwhile
                transfer = self._engine.submit_write(self._target, source, target, write.num_bytes)
        if not transfer:
            return self._refuse()
        number = next(self._ids)
        self._transfers[number] = transfer
        return number

    def _refuse(self) -> int:
        number = next(self._ids)
        self._refused.add(number)
        return number

    def _is_allowed(self, ticket_id: str) -> bool:
        """The reader's word on a ticket; asked once, since it fences this channel before it takes it back."""
        with self._talking:
            if self._is_closing:
                raise SubmitFailed("the channel is closed")
            if ticket_id not in self._asked:
                try:
                    self._talk.send({"ticket": ticket_id})
                    self._asked[ticket_id] = self._talk.receive(ANSWER_S).get("allowed") is True
                except TransferError as exc:
                    raise SubmitFailed(f"the reader does not say whether it takes the ticket: {exc}") from None
            return self._asked[ticket_id]

    def poll(self, ids: Sequence[int]) -> Mapping[int, WriteState]:
        states = dict.fromkeys(ids, WriteState.PENDING)
        for i in self._refused.intersection(ids):
            states[i] = WriteState.REFUSED
            self._refused.discard(i)
        with contextlib.suppress(TransferError):  # closed meanwhile: whoever closed it knows
            self._poll_engine(ids, states)
        return states

    def _poll_engine(self, ids: Sequence[int], states: dict[int, WriteState]) -> None:
        pending = 0
        for i in ids:
            if i not in self._transfers:
                continue
            code = self._engine.check_status(self._transfers[i])
            if code == 0:
                pending += 1
                if pending == _LOOK_AHEAD:
                    break
                continue
            states[i] = WriteState.DONE if code == 1 else WriteState.FAILED
            del self._transfers[i]
            self._progress_s = time.monotonic()
        if pending and self._has_stalled():
            states.update((i, WriteState.FAILED) for i in ids if i in self._transfers)
            self._transfers.clear()

    def _has_stalled(self) -> bool:
        now_s = time.monotonic()
        if now_s - self._progress_s > STALL_S:
            return True
        if now_s - max(self._progress_s, self._looked_s) < _LOOK_S or self._protocol == "rdma":
            return False
        self._looked_s = now_s
        return not guard.own_connections(self._ports)

    def close(self) -> None:
        self._is_closing = True
        self._engine.close()
        if not self._talking.acquire(timeout=CONFIRM_S):
            raise TransferError("a question to the reader is still open")
        try:
            self._talk.send({"gone": True})
            if self._talk.receive(CONFIRM_S).get("drained") is not True:
                raise TransferError("the reader still has connections of ours")
        finally:
            self._talking.release()
            self._talk.close()

    def _abandon(self) -> None:
        try:
            self._engine.close()
        finally:
            self._talk.close()
