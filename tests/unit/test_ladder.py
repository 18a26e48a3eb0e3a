"""Which rungs there are for a failure, and in which order."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from services.protocol.errors import ErrorCode
from services.router.ladder import Rung, Standing, rungs


def standing(**changed: Any) -> Standing:
    values: dict[str, Any] = {"code": ErrorCode.WORKER_LOST, "is_retryable": True, "attempts_left": 3}
    return Standing(**(values | changed))


def kv(**changed: Any) -> Standing:
    return standing(**({"code": ErrorCode.TRANSFER_FAILED} | changed))


@pytest.mark.parametrize(
    ("failed", "expected"),
    [
        (standing(), [Rung.RETRY]),
        (standing(has_outputs=True), [Rung.MIGRATE]),
        (standing(can_retarget=True), [Rung.RETARGET, Rung.RETRY]),
        (standing(can_retarget=True, has_outputs=True), [Rung.RETARGET, Rung.MIGRATE]),
        (standing(can_retarget=True, was_retargeted=True), [Rung.RETARGET, Rung.RETRY]),
        (standing(attempts_left=0, can_retarget=True), []),
        (standing(is_retryable=False, can_retarget=True), []),
        (standing(policy="fail"), [Rung.RETRY]),  # a lost worker is no failed transfer
        (kv(can_retarget=True), [Rung.RETARGET, Rung.RETRY, Rung.COMPUTE_HERE]),
        (kv(can_retarget=True, was_retargeted=True), [Rung.RETRY, Rung.COMPUTE_HERE]),
        (kv(attempts_left=1), [Rung.COMPUTE_HERE, Rung.RETRY]),
        (kv(attempts_left=1, can_retarget=True), [Rung.COMPUTE_HERE, Rung.RETARGET, Rung.RETRY]),
        (kv(attempts_left=1, has_outputs=True), [Rung.COMPUTE_HERE, Rung.MIGRATE]),
        (kv(can_retarget=True, policy="recompute"), [Rung.RETRY, Rung.COMPUTE_HERE]),
        (kv(can_retarget=True, policy="fail"), []),
    ],
)
def test_the_rungs_in_order(failed: Standing, expected: list[Rung]) -> None:
    assert list(rungs(failed)) == [*expected, Rung.FAIL]


def test_every_ladder_ends_and_no_rung_comes_twice() -> None:
    booleans = (False, True)
    for code, retryable, left, policy, *flags in product(
        (ErrorCode.WORKER_LOST, ErrorCode.TRANSFER_FAILED, ErrorCode.OVERLOADED),
        booleans, range(4), ("ladder", "recompute", "fail"), booleans, booleans, booleans,
    ):  # fmt: skip
        failed = standing(
            code=code, is_retryable=retryable, attempts_left=left, policy=policy,
            can_retarget=flags[0], was_retargeted=flags[1], has_outputs=flags[2],
        )  # fmt: skip
        found = rungs(failed)
        assert found[-1] is Rung.FAIL
        assert len(set(found)) == len(found)
        assert not {Rung.RETRY, Rung.MIGRATE} <= set(found)
        assert Rung.RETRY not in found or not failed.has_outputs
