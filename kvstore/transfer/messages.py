"""What crosses the pipe between a worker's service process and its transfer process.

Writer (prefill)                                Reader (decode)
    OpenSource   blocks that a prompt will fill     OpenListener  a peer may write here   ─► ListenerReady
    OpenTicket   a grant came: push to these        Allow         a ticket may land
    CloseTicket  no more of it     ─► TicketClosed  Verify        hash what landed        ─► Verified
    Resend       bad extents, once                  Revoke        the ticket is over      ─► TicketClosed
    CloseSource  the prompt's blocks are released
             ─► Pushed | PushFailed
    TransfersFailed: what failed on the way, by stage

Both: Fence(peer) closes the peer's channel and listener ─► Fenced. Progress comes on a socket of its own, straight
from the engine (`kvstore.transfer.progress`), so that a layer is on the wire while the next one computes.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.errors import FailureKind
from kvstore.wire import Codec

START_S = 30.0
"""How long the parent waits for Started, and the process for Start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """First message: the memory (a memfd passed to the process), its geometry and the transport."""

    geometry: dict[str, object]  # KVGeometry.to_dict()
    transport: str  # see kvstore.transfer.options.load_transport
    allow_fallback: bool = False
    protocol: str
    device: str
    host: str  # address that listeners bind and segments name
    secret: str
    digests: bool
    layerwise: bool
    max_outstanding: int
    fence_after_ms: int
    throttle_bytes_per_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The transport runs. ``transport`` may differ from the one asked for ("auto"); ``note`` then says why."""

    pid: int
    transport: str
    note: str = ""
    spares: tuple[str, ...] = ()  # run beside it, for peers that do not have it


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFailed:
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSource:
    """The blocks of one prompt on the writer; ``ready_blocks`` leading ones hold their KV in all layers already."""

    seq_id: str
    block_ids: tuple[int, ...]
    ready_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTicket:
    """Push ``seq_id`` to a reader: what is computed at once, the rest as it is computed. A source may be pushed under a
    new ticket after an earlier one was closed (Retarget)."""

    ticket_id: str
    seq_id: str
    worker_id: str
    epoch: str
    segment: str
    geometry: dict[str, object]  # the reader's
    block_ids: tuple[int, ...]  # the reader's, one for each block of the source
    skip_blocks: int  # leading ones that the reader has


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseTicket:
    """Stop pushing; answered by TicketClosed."""

    ticket_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseSource:
    """The blocks of the source are about to be reused; its tickets are closed first."""

    seq_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Neighbouring blocks of one layer in the reader's memory."""

    layer: int
    block: int
    count: int
    digest: int = 0  # xxh3-64; 0 where digests are off


@dataclass(frozen=True, slots=True, kw_only=True)
class Resend:
    ticket_id: str
    extents: tuple[Extent, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTrace:
    """When one layer of one chunk went: monotonic seconds of this machine, for the timeline and the benchmark."""

    step: int
    layer: int
    computed_s: float
    submitted_s: float
    done_s: float
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """Every layer of every block of the ticket is in the reader's memory."""

    ticket_id: str
    extents: tuple[Extent, ...]  # all of them after the first push, the bad ones after Resend
    num_bytes: int
    layers: tuple[LayerTrace, ...]
    submit_s: float = 0.0  # CPU time of handing the writes to the transport
    digest_s: float = 0.0  # CPU time of hashing our memory


@dataclass(frozen=True, slots=True, kw_only=True)
class PushFailed:
    """The ticket cannot be completed. Its writes may still land until the peer is fenced."""

    ticket_id: str
    message: str
    kind: str = FailureKind.COMPLETION  # of what happened last


@dataclass(frozen=True, slots=True, kw_only=True)
class TransfersFailed:
    """Something went wrong between here and a peer, whatever came of it afterwards; for counting."""

    worker_id: str
    epoch: str
    kind: str  # kvstore.errors.FailureKind
    count: int
    message: str = ""  # of the last one


@dataclass(frozen=True, slots=True, kw_only=True)
class TicketClosed:
    """Nothing of this ticket reads the source blocks any more, so the writer may reuse them.

    ``fenced``: no write of it can land any more either. Without it (the reader did not confirm the end of the
    channel, or the reader's transport cannot forbid a single ticket) the reader must fence the peer before it reuses
    the blocks.
    """

    ticket_id: str
    fenced: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenListener:
    worker_id: str
    epoch: str
    transport: str = ""  # one of those that run here; empty: the first


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerReady:
    worker_id: str
    epoch: str
    segment: str  # empty: `error` says why
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allow:
    ticket_id: str
    worker_id: str
    epoch: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Revoke:
    ticket_id: str
    worker_id: str
    epoch: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verify:
    ticket_id: str
    extents: tuple[Extent, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    ticket_id: str
    bad: tuple[Extent, ...]  # empty: every extent has its digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    worker_id: str
    epoch: str
    forget: bool = False  # the peer's epoch is over: do not open another channel or listener


@dataclass(frozen=True, slots=True, kw_only=True)
class Fenced:
    """Nothing between this worker and that peer epoch is in flight. With live tickets of it, they are being sent again.

    ``segment``: of the listener opened in place of the closed one; empty where there was none or ``forget`` was set.
    """

    worker_id: str
    epoch: str
    segment: str = ""


CODEC = Codec(
    (
        Start, Started, StartFailed, OpenSource, OpenTicket, CloseTicket, CloseSource, Extent, Resend, LayerTrace,
        TransfersFailed, Pushed, PushFailed, TicketClosed, OpenListener, ListenerReady, Allow, Revoke, Verify, Verified,
        Fence, Fenced,
    )
)  # fmt: skip
