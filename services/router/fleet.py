"""Which links there are, and whose they are: addresses come from discovery, worker ids from what answers there.

    address listed ─► Link ─described─► owns the worker id ─attached─► in the view
                                └─ held back: another application's secret, the same process by another address,
                                   an id that a living process has

An address leaves when no source lists it and nothing has answered there for `FORGET_S`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from services.protocol.auth import verify_registration
from services.protocol.errors import ErrorCode, RequestError
from services.protocol.proto import worker_pb2
from services.router.calls import WorkerCalls
from services.router.links import Link, LinkState, RouterIdentity
from services.router.member import WorkerState
from services.router.view import View
from services.telemetry.metrics import RouterMetrics

FORGET_S = 30.0
ATTACHING_S = 3.0
"""A link that has described its worker may take so long to attach before another address of that worker may try."""
UNSIGNED = "its registration is not signed with this application's secret (config: secret)"

_log = logging.getLogger("pdray.router.fleet")


class Deliveries(Protocol):
    """The part of the switchboard that the fleet feeds."""

    def deliver(self, worker_id: str, message: worker_pb2.WorkerMessage) -> None: ...
    def fail_worker(self, worker_id: str, error: RequestError) -> None: ...
    def worker_is_back(self, worker_id: str) -> None: ...
    def worker_is_new(self, worker_id: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    identity: RouterIdentity
    secret: str
    silence_s: float  # a stream that says nothing for so long is broken; workers speak once a second


class Fleet:
    """All links of one router. `deliveries` is set once, before the first address."""

    def __init__(self, settings: FleetSettings, view: View, metrics: RouterMetrics, clock: Callable[[], float]) -> None:
        self.deliveries: Deliveries
        self._settings = settings
        self._view = view
        self._metrics = metrics
        self._clock = clock
        self._links: dict[str, Link] = {}
        self._owners: dict[str, Link] = {}  # worker id -> its link
        self._listed: frozenset[str] = frozenset()
        self._closing: set[asyncio.Task[None]] = set()

    # --- discovery ---

    def set_addresses(self, listed: Collection[str]) -> None:
        """What the sources list now. New ones are linked at once; others leave by `sweep`."""
        self._listed = frozenset(listed)
        for address in sorted(self._listed - self._links.keys()):
            link = Link(
                address, self._settings.identity, self._settings.secret, self, self._settings.silence_s, self._clock
            )
            self._links[address] = link
            link.start()

    def sweep(self) -> None:
        """Drop addresses that nobody lists and where nobody answers; called about once a second."""
        now = self._clock()
        for address, link in list(self._links.items()):
            gone = link.state in (LinkState.CONNECTING, LinkState.LOST) and now - link.changed_s > FORGET_S
            if gone and address not in self._listed:
                self._drop(address, link)

    async def stop(self) -> None:
        await asyncio.gather(*(link.stop() for link in self._links.values()), *self._closing)

    # --- for the flow ---

    def calls(self, worker_id: str) -> WorkerCalls | None:
        """Calls of a worker that is attached now."""
        link = self._owners.get(worker_id)
        return link.calls if link is not None and link.state is LinkState.ATTACHED else None

    def unknown(self) -> list[Link]:
        """Links that no worker of the view stands for: never attached, or held back; by address."""
        shown = {owner for worker_id, owner in self._owners.items() if self._view.entry(worker_id) is not None}
        return [self._links[a] for a in sorted(self._links) if self._links[a] not in shown]

    # --- from links ---

    def may_attach(self, link: Link, registration: worker_pb2.Registration) -> str:
        if not verify_registration(registration, self._settings.secret):
            self._metrics.index_ignored.inc()
            return UNSIGNED
        worker_id = registration.worker_id
        owner = self._owners.get(worker_id)
        if owner is None or owner is link:
            self._own(link, registration)
            return ""
        alive = owner.state in (LinkState.ATTACHED, LinkState.GRACE)
        attaching = owner.state is LinkState.CONNECTING and self._clock() - owner.described_s < ATTACHING_S
        if owner.epoch == registration.epoch and (alive or attaching):
            return f"the same process as {worker_id} at {owner.address}"
        if owner.state is LinkState.ATTACHED:
            return f"worker id {worker_id} is in use by another process at {owner.address}"
        if alive:
            self._give_up(worker_id, f"{worker_id} came back as another process at {link.address}")
        self._own(link, registration)
        return ""

    def on_attached(self, link: Link) -> None:
        _log.info("attached to %s (%s) at %s", link.worker_id, link.registration.role, link.address)
        self._view.registered(link.registration, link.address)
        self._view.link_is(link.worker_id, WorkerState.READY)
        self.deliveries.worker_is_back(link.worker_id)

    def on_message(self, link: Link, message: worker_pb2.WorkerMessage) -> None:
        worker_id = link.worker_id
        if message.HasField("registration") and message.registration.epoch == link.epoch:
            if verify_registration(message.registration, self._settings.secret):
                self._view.registered(message.registration, link.address)
            else:
                self._metrics.index_ignored.inc()
        self.deliveries.deliver(worker_id, message)
        if message.HasField("load"):
            self._loaded(worker_id, message.load)

    def on_detached(self, link: Link) -> None:
        if self._owners.get(link.worker_id) is link:
            self._view.link_is(link.worker_id, WorkerState.CONNECTING, "the stream broke; reconnecting")

    def on_lost(self, link: Link, reason: str) -> None:
        if self._owners.get(link.worker_id) is not link:
            return
        if link.state is LinkState.LOST:
            self._view.link_is(link.worker_id, WorkerState.LOST, reason)
        self._give_up(link.worker_id, reason)

    def _loaded(self, worker_id: str, load: worker_pb2.Load) -> None:
        entry = self._view.entry(worker_id)
        before = entry is not None and entry.progress.is_stalled
        self._view.loaded(worker_id, load)
        if entry is not None and entry.progress.is_stalled and not before:
            self._metrics.worker_losses.labels("stalled").inc()
            _log.warning("%s is stalled at step %d", worker_id, load.step)
            text = f"{worker_id} makes no progress (worker.stall_s)"
            self.deliveries.fail_worker(worker_id, RequestError(ErrorCode.WORKER_LOST, text))

    def _own(self, link: Link, registration: worker_pb2.Registration) -> None:
        entry = self._view.entry(registration.worker_id)
        if entry is None or entry.epoch != registration.epoch:
            self.deliveries.worker_is_new(registration.worker_id)
        for other in [w for w, owner in self._owners.items() if owner is link and w != registration.worker_id]:
            del self._owners[other]  # another worker now listens at this address
            self._view.dropped(other)
        self._owners[registration.worker_id] = link

    def _give_up(self, worker_id: str, reason: str) -> None:
        self._metrics.worker_losses.labels("lost").inc()
        self.deliveries.fail_worker(worker_id, RequestError(ErrorCode.WORKER_LOST, reason))

    def _drop(self, address: str, link: Link) -> None:
        del self._links[address]
        if self._owners.get(link.worker_id) is link:
            del self._owners[link.worker_id]
            self.deliveries.worker_is_new(link.worker_id)
            self._view.dropped(link.worker_id)
        task = asyncio.create_task(link.stop(), name=f"close-{address}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
