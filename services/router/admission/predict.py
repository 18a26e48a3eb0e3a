"""What a request will take: the policy's terms, corrected by how wrong they were on each worker before. Pure.

    first token  =  waited so far + (queue(P) + load + compute) × correction(P) + room(D)
    each token   =  step time of D with one sequence more, from its measured steps against their batch sizes

queue(P) is what P holds and what waits for it before this request, at P's rate; what waits behind it does not count.
Token 1 goes out before the hand-off ends, so neither the transfer nor the decode worker's blocks count for the first.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field

from services.router.bookings import Booking
from services.router.policy_types import Terms

WEIGHT = 0.1
"""Of a new sample in a correction."""
MOST = 4.0
"""A correction lies between 1 / MOST and MOST, and no single sample counts for more."""
Z_95 = 1.645
MOST_SPREAD = 2.0
HALF_LIFE_S = 15.0
"""Of a correction while nothing new is seen."""
LEAST_MS = 1.0
"""Shorter times are noise of the event loop: they teach nothing."""
MAX_WORKERS = 1024
DECAY = 0.98
"""Weight of a step's measurement after the next one."""
MIN_SPREAD = 0.2
"""Variance of the batch sizes from which a slope can be told."""
START_ANSWER_TOKENS = 128.0
"""Assumed of an answer until some have ended."""


def token_ms(terms: Terms, booking: Booking) -> float:
    """Of one prompt token on the prefill worker of a decision."""
    return terms.compute_ms / max(1, booking.prefill_tokens)


@dataclass(slots=True)
class Corrections:
    """Actual over predicted, as a moving mean of logarithms: one outlier moves it little, and never past its bounds.

    What was learned fades: who is refused for it teaches nothing, so it would stand forever.
    """

    _logs: OrderedDict[str, tuple[float, float, float]] = field(default_factory=OrderedDict)  # mean, variance, when

    def of(self, worker_id: str, now_s: float) -> float:
        """1 for a worker that nothing is known of."""
        return math.exp(self._faded(worker_id, now_s)[0])

    def spread(self, worker_id: str, now_s: float) -> float:
        """Times the corrected prediction: what 95 % stay below, at most `MOST_SPREAD`."""
        return min(math.exp(Z_95 * math.sqrt(self._faded(worker_id, now_s)[1])), MOST_SPREAD)

    def observe(self, worker_id: str, predicted_ms: float, actual_ms: float, now_s: float) -> None:
        """``predicted_ms`` without a correction."""
        if predicted_ms < LEAST_MS or actual_ms < LEAST_MS:
            return
        bound = math.log(MOST)
        sample = min(max(math.log(actual_ms / predicted_ms), -bound), bound)
        mean, variance = self._faded(worker_id, now_s) if worker_id in self._logs else (sample, 0.0)
        off = sample - mean
        self._logs[worker_id] = mean + WEIGHT * off, (1 - WEIGHT) * (variance + WEIGHT * off * off), now_s
        self._logs.move_to_end(worker_id)
        if len(self._logs) > MAX_WORKERS:
            self._logs.popitem(last=False)

    def _faded(self, worker_id: str, now_s: float) -> tuple[float, float]:
        mean, variance, at_s = self._logs.get(worker_id, (0.0, 0.0, now_s))
        left = 0.5 ** (max(0.0, now_s - at_s) / HALF_LIFE_S)
        return mean * left, variance * left


@dataclass(slots=True)
class StepModel:
    """A decode worker's step time as a line over its batch size, by least squares that forget."""

    _weight: float = 0.0
    _x: float = 0.0  # weighted sums of batch sizes, times, squares and products
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0

    def observe(self, sequences: int, step_ms: float) -> bool:
        """False for what tells of no step."""
        if sequences < 1 or not 0 < step_ms < math.inf:
            return False
        self._weight = self._weight * DECAY + 1
        self._x = self._x * DECAY + sequences
        self._y = self._y * DECAY + step_ms
        self._xx = self._xx * DECAY + sequences * sequences
        self._xy = self._xy * DECAY + sequences * step_ms
        return True

    def step_ms(self, sequences: int) -> float:
        """Predicted for a batch of so many; 0 where nothing was measured.

        Never less than at a smaller batch: a falling line is noise and counts as a flat one.
        """
        if not self._weight:
            return 0.0
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean_x * mean_x
        slope = 0.0
        if spread >= MIN_SPREAD:
            slope = max(0.0, (self._xy / self._weight - mean_x * mean_y) / spread)
        return max(mean_y + slope * (sequences - mean_x), 0.1 * mean_y)


@dataclass(slots=True)
class AnswerLength:
    """Moving mean of tokens of an answer."""

    tokens: float = START_ANSWER_TOKENS

    def observe(self, tokens: int) -> None:
        self.tokens += WEIGHT * (tokens - self.tokens)


def room_wait_ms(lacking: int, sequences: int, step_ms: float, answer_tokens: float) -> float:
    """Until ``lacking`` of a worker's ``sequences`` have ended, where each has a mean answer to make and they ended one
    after the other at an even pace."""
    return lacking * answer_tokens * step_ms / max(sequences, 1)
