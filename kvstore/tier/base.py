"""Everything that an engine sees of a place that holds KV beside its own pool: a peer, host memory, a store.

    lookup ─► reserve ─► start_load ─► wait_layer … ─► errors ─► finish        a load
                 └────────────┴─ abort at any moment
    save_layer (0 … L-1) ─► saved                                              a save

Blocks are known by their names: 128-bit digests, chained from a root that holds the tenant's salt, the model, the
tokenizer, the dtype and the layout. A connector that keeps to names, or to root and tokens together, lets nothing cross
from one of these to another.

**Threads.** Every method is called by the engine's step loop, on one thread, and returns at once: a connector that must
wait does so in a thread or a process of its own, and the loop asks again. What `poll` does itself takes about a
millisecond at most. Only `wait_layer` may be called from elsewhere, and only there with a time to wait.

**Ownership.** The blocks of a load belong to the connector from `start_load` until `finish` or `abort` has returned
True, or `fenced` has named the sequence. Meanwhile nobody else reads, writes or reuses them. The blocks of a save may
be read from `save_layer` of layer 0 until `saved` has named it; nobody writes into them meanwhile.

**Failure** is never an exception: a load ends early and `errors` says which blocks hold nothing, a save is forgotten.
The engine computes what is missing. A connector that raises is not asked again: what it was loading stays quarantined
for good, what it was saving is free at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Prefix:
    """The tokens of a sequence, and the names of its leading full blocks. Both may grow at their ends meanwhile."""

    root: bytes
    token_ids: Sequence[int]
    names: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Save:
    """Named blocks first .. first + len(block_ids) - 1 of a prefix, whose content is final in the pool."""

    number: int
    prefix: Prefix
    first: int
    block_ids: Sequence[int]


class Loader(Protocol):
    """One source of KV."""

    def lookup(self, seq_id: str, prefix: Prefix) -> int | None:
        """How many leading blocks of the prefix it could load, those included that the pool has too.

        None: not known yet; asked again soon, and for a bounded time only. Asked again also while a sequence waits, so
        an answer costs microseconds. It is no promise. Each sequence that was looked up ends with `finish` or `abort`.
        """
        ...

    def reserve(self, seq_id: str, prefix: Prefix, first: int, count: int) -> int:
        """Keep what blocks first .. first + count - 1 need from being evicted, until the load ends. Follows a `lookup`
        of the same sequence that was answered.

        Returns how many of them, from ``first`` on, will be loaded; 0: the load is off, and nothing is kept.
        """
        ...

    def start_load(self, seq_id: str, block_ids: Sequence[int]) -> None:
        """Begin to fill all layers of these blocks of the pool, as reserved: block ``first`` comes first."""
        ...

    def wait_layer(self, seq_id: str, layer: int, timeout_s: float = 0.0) -> bool:
        """Whether this layer and those before it are in, for all blocks of the load, or the load has ended early.

        The step loop asks for the last layer, and never waits. A thread that computes layer by layer may.
        """
        ...

    def errors(self, seq_id: str) -> frozenset[int]:
        """Which of the load's block ids do not hold their KV, once `wait_layer` has said True for the last layer."""
        ...

    def finish(self, seq_id: str) -> bool:
        """The engine is done with the sequence's load, or with its look-up.

        False: a write may still land in any of the blocks, so none of them counts; see `fenced`.
        """
        ...

    def abort(self, seq_id: str) -> bool:
        """The sequence is over, or its load has taken too long, in whatever state. Otherwise as `finish`."""
        ...

    def fenced(self) -> Sequence[str]:
        """Sequences, since the last call, whose `finish` or `abort` said False and whose blocks are safe by now."""
        ...


class Connector(Loader, Protocol):
    """A source that keeps what it is given. Its instance lives as long as the engine."""

    chunk_blocks: int
    """Saves begin and end at multiples of so many blocks; 1 for most."""

    def save_layer(self, save: Save, layer: int) -> None:
        """Take over one layer of these blocks; called once for each layer, in order. What it has already, it skips."""
        ...

    def saved(self) -> Sequence[int]:
        """Numbers of saves, since the last call, whose blocks it does not read any more, kept or not."""
        ...

    def poll(self) -> float | None:
        """Do a bounded piece of its own work, between two steps.

        Returns how many seconds may pass before the next call; 0: there is more to do. None: nothing is under way.
        """
        ...

    def stats(self) -> dict[str, int]:
        """Counters since the start and gauges, by name, such as blocks kept. For people; nobody decides by them."""
        ...

    def close(self) -> None:
        """End threads and connections. Nothing is called afterwards."""
        ...


@runtime_checkable
class Telling(Protocol):
    """What a connector may have beside: it knows what it keeps, so that routers can reckon with it."""

    tier: int
    """As `kvstore.index.base.Tier` numbers them."""

    def take_events(self) -> tuple[Sequence[bytes], Sequence[bytes]]:
        """Names of blocks that it keeps now and did not at the last call, parents first; and those the other way."""
        ...
