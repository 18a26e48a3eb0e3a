"""What the router has just sent to workers and their loads do not show yet: a ledger, so that a burst does not herd.

    book ──► prefill outstanding ──prefill_done──► decode only ──release──► gone
               └── counted twice over: as long as it is outstanding, and until the worker's next load shows it ──┘

A load that comes in covers everything booked before it, but for a message still under way: so outstanding bookings
bound the estimate from below. A worker's outputs are to be counted before the load of the same message.

The queue of a prefill worker is what this router has there, less what was computed since its last first token, and
what the load shows beyond it: other routers' prompts. A load counts prompts that wait with all their tokens, hits
included; so this router's own are taken out of it as they are counted there, and put in without their hits.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Booking:
    """Work of one attempt of one request."""

    prefill_id: str
    prefill_tokens: int  # to be computed: prompt without cached blocks
    decode_id: str  # the mixed worker again where one worker does all
    decode_blocks: int  # to be held beyond what is cached there
    sequences: int = 1  # choices that will decode there
    prompt_tokens: int = 0  # cached ones included, as the worker's load counts it while it waits

    @property
    def told_tokens(self) -> int:
        return max(self.prompt_tokens, self.prefill_tokens) if self.prefill_tokens else 0


@dataclass(slots=True)
class _Account:
    """One worker. `added` and `done` count since its last load, `computed` since its last first token."""

    outstanding_tokens: int = 0
    told_tokens: int = 0  # of the same prompts, as loads count them
    told_at_load: int = 0
    computed_tokens: int = 0
    computed_before: int | None = None  # the worker's counter at the last first token
    sequences: int = 0
    added_sequences: int = 0
    done_sequences: int = 0
    added_blocks: int = 0
    booked: set[str] = field(default_factory=set)


class Bookings:
    """Not thread-safe; every method is O(1)."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._bookings: dict[str, Booking] = {}
        self._computing: set[str] = set()

    def __len__(self) -> int:
        return len(self._bookings)

    def book(self, request_id: str, booking: Booking) -> None:
        """Count a choice at once; a booking that the request had before is released."""
        self.release(request_id)
        self._bookings[request_id] = booking
        self._computing.add(request_id)
        p = self._account(booking.prefill_id, request_id)
        p.outstanding_tokens += booking.prefill_tokens
        p.told_tokens += booking.told_tokens
        d = self._account(booking.decode_id, request_id)
        d.sequences += booking.sequences
        d.added_sequences += booking.sequences
        d.added_blocks += booking.decode_blocks

    def prefill_done(self, request_id: str) -> None:
        """Token 1 is there."""
        booking = self._bookings.get(request_id)
        if booking is None or request_id not in self._computing:
            return
        self._computing.discard(request_id)
        account = self._accounts[booking.prefill_id]
        account.outstanding_tokens -= booking.prefill_tokens
        account.told_tokens -= booking.told_tokens
        account.computed_tokens, account.computed_before = 0, None

    def release(self, request_id: str) -> None:
        """The attempt is over, however it ended."""
        self.prefill_done(request_id)
        booking = self._bookings.pop(request_id, None)
        if booking is None:
            return
        account = self._accounts[booking.decode_id]
        account.sequences -= booking.sequences
        account.done_sequences += booking.sequences
        for worker_id in {booking.prefill_id, booking.decode_id}:
            self._forget(worker_id, request_id)

    def cancel(self, request_id: str) -> None:
        """It was never sent: what was counted for it is taken back."""
        booking = self._bookings.pop(request_id, None)
        if booking is None:
            return
        p, d = self._accounts[booking.prefill_id], self._accounts[booking.decode_id]
        if request_id in self._computing:
            self._computing.discard(request_id)
            p.outstanding_tokens -= booking.prefill_tokens
            p.told_tokens -= booking.told_tokens
        d.sequences -= booking.sequences
        d.added_sequences = max(0, d.added_sequences - booking.sequences)
        d.added_blocks = max(0, d.added_blocks - booking.decode_blocks)
        for worker_id in {booking.prefill_id, booking.decode_id}:
            self._forget(worker_id, request_id)

    def load_came(self, worker_id: str, computed_tokens: int = 0) -> None:
        """A load of this worker came in: what was booked before is in it.

        Args:
            computed_tokens: the worker's count of prompt tokens computed since it started.
        """
        account = self._accounts.get(worker_id)
        if account is not None:
            account.told_at_load = account.told_tokens
            if account.computed_before is None or computed_tokens < account.computed_before:
                account.computed_before = computed_tokens
            account.computed_tokens = computed_tokens - account.computed_before
            account.added_sequences = account.done_sequences = 0
            account.added_blocks = 0
            self._drop_if_idle(worker_id)

    def queued_tokens(self, worker_id: str, load_tokens: int) -> int:
        """Prompt tokens to be computed before a new request, given what the last load said."""
        a = self._accounts.get(worker_id, _IDLE)
        others = max(0, load_tokens - max(0, a.told_at_load - a.computed_tokens))
        return max(0, a.outstanding_tokens - a.computed_tokens) + others

    def active_sequences(self, worker_id: str, load_sequences: int) -> int:
        a = self._accounts.get(worker_id, _IDLE)
        return max(a.sequences, load_sequences + a.added_sequences - a.done_sequences, 0)

    def free_blocks(self, worker_id: str, load_blocks: int) -> int:
        """May be negative: more is booked than the last load had free."""
        return load_blocks - self._accounts.get(worker_id, _IDLE).added_blocks

    def _account(self, worker_id: str, request_id: str) -> _Account:
        account = self._accounts.setdefault(worker_id, _Account())
        account.booked.add(request_id)
        return account

    def _forget(self, worker_id: str, request_id: str) -> None:
        account = self._accounts.get(worker_id)
        if account is not None:
            account.booked.discard(request_id)

    def _drop_if_idle(self, worker_id: str) -> None:
        if not self._accounts[worker_id].booked:
            del self._accounts[worker_id]


_IDLE = _Account()
