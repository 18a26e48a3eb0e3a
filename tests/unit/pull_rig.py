"""A pull between the two workers of `handoff_rig`: P asks D, or another holder, for leading blocks of a prompt."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.transfer import messages as t
from services.engine import messages as m
from services.protocol.proto import worker_pb2
from tests.unit.handoff_rig import ROUTER, Half, Pair

PROMPT = tuple(range(1, 81))  # 5 blocks of 16
NAMES = b"".join(bytes([i]) * 16 for i in range(5))
WANTED = (30, 31, 32)  # P's blocks for names 1 to 3; it has the first
HELD = (7, 5, 6, 9)  # the holder's blocks of names 0 to 3
GOOD = tuple(t.Extent(layer=i, block=30, count=3, digest=i + 1) for i in range(2))


@dataclass
class PullPair(Pair):
    """P reads, D writes; engines and transfers are the test's."""

    async def ask(self, request_id: str = "r", remaining_ms: int = 20_000) -> str:
        """Submit a prompt of which D holds four blocks, up to the engine's LoadWanted."""
        d = self.d.core.registration
        await self.p.core.submit(
            worker_pb2.SubmitRequest(
                request=worker_pb2.Request(
                    request_id=request_id,
                    router_id=ROUTER[0],
                    router_epoch=ROUTER[1],
                    prompt_ids=PROMPT,
                    block_names=NAMES,
                    remaining_ms=remaining_ms,
                    root_digest=b"root",
                    sampling=worker_pb2.Sampling(max_tokens=8),
                ),
                reader=worker_pb2.Reader(worker_id=d.worker_id, epoch=d.epoch, address=d.address),
                source=worker_pb2.Source(worker_id=d.worker_id, epoch=d.epoch, address=d.address, blocks=4),
            )
        )
        seq_id = f"{request_id}.0"
        added = [x for x in self.p.engine if isinstance(x, m.AddSequence)][-1]
        assert (added.seq_id, added.offered_blocks) == (seq_id, 4)
        self.p.core.on_engine(m.LoadWanted(seq_id=seq_id, block_ids=(2, *WANTED, 33), first=1, count=3))
        return seq_id

    async def listen(self) -> t.Allow:
        """P's memory is open to D."""
        opened = await self.p.sent(t.OpenListener)
        assert (opened.worker_id, opened.epoch) == ("decode-0", "de")
        self.p.core.role.on_transfer(t.ListenerReady(worker_id=opened.worker_id, epoch=opened.epoch, segment="segment"))
        return await self.p.sent(t.Allow)

    async def pin(self, block_ids: tuple[int, ...] = HELD) -> None:
        """D's engine holds these."""
        pins = await self.d.sent(m.PinBlocks, "engine")
        self.d.core.on_engine(m.Pinned(seq_id=pins.seq_id, block_ids=block_ids))

    async def lend(self, block_ids: tuple[int, ...] = HELD) -> t.OpenTicket:
        """All up to D's push."""
        await self.listen()
        await self.pin(block_ids)
        return await self.d.sent(t.OpenTicket)

    def push(self, ticket_id: str, extents: tuple[t.Extent, ...] = GOOD) -> None:
        self.d.core.role.on_transfer(t.Pushed(ticket_id=ticket_id, extents=extents, num_bytes=4096, layers=()))

    async def check(self, bad: tuple[t.Extent, ...] = (), skip: int = 0) -> None:
        verify = await self.p.sent(t.Verify, skip=skip)
        self.p.core.role.on_transfer(t.Verified(ticket_id=verify.ticket_id, bad=bad))

    def closed(self, half: Half, ticket_id: str, *, fenced: bool) -> None:
        half.core.role.on_transfer(t.TicketClosed(ticket_id=ticket_id, fenced=fenced))

    async def loaded(self) -> m.Loaded:
        return await self.p.sent(m.Loaded, "engine")

    async def released(self) -> None:
        """D's engine may evict the blocks again."""
        pins = await self.d.sent(m.PinBlocks, "engine")
        assert (await self.d.sent(m.ReleaseSequence, "engine")).seq_id == pins.seq_id
        assert (await self.d.sent(t.CloseSource)).seq_id == pins.seq_id

    def leftovers(self) -> dict[str, object]:
        """What the two workers still know of tickets."""
        p, d = self.p.core.role, self.d.core.role
        found = {
            "reader": p._inbox.tickets,  # type: ignore[attr-defined]
            "pulls": p._puller._pulls,  # type: ignore[attr-defined]
            "offers": p._puller._offers,  # type: ignore[attr-defined]
            "quarantines": dict(p._quarantines._waits),  # type: ignore[attr-defined]
            "loans": d._lender._loans,  # type: ignore[attr-defined]
            "writer": d._outbox.tickets,  # type: ignore[attr-defined]
            "leases": {k: v for k, v in d._outbox.leases._tickets.items() if v},  # type: ignore[attr-defined]
        }
        return {k: v for k, v in found.items() if v}
