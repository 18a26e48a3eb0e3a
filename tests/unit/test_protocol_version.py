"""A rolling upgrade: peers one version apart work together, others refuse each other and say both versions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from services.protocol import version
from services.protocol.auth import sign_registration, verify_registration
from services.protocol.errors import ErrorCode, RequestError
from services.protocol.proto import worker_pb2
from services.protocol.version import PROTOCOL_VERSION, apart
from services.router.compat import Kind, Member, refusals
from services.worker.attach import AttachHub
from services.worker.handoff.inbound import check_fingerprint

KIND = Kind("m", "t", "float32", 16, 1, "[]", 1, 1)


@pytest.mark.parametrize(("theirs", "is_understood"), [(5, True), (4, True), (6, True), (3, False), (7, False)])
def test_one_version_apart_is_understood_whoever_is_older(theirs: int, is_understood: bool) -> None:
    why = apart(theirs, 5, "w1", "the router")
    assert (why == "") is is_understood
    assert is_understood or f"{theirs} on w1, 5 on the router" in why


def test_a_worker_too_far_from_the_router_or_from_another_worker_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.router.compat.PROTOCOL_VERSION", 5)
    members = [Member(f"w{v}", KIND, protocol=v) for v in (5, 4, 6, 7, 3)]
    reasons = refusals(members)
    assert set(reasons) == {"w6", "w7", "w3"}, "6 fits the router, but not the worker of version 4"
    assert "6 on w6, 4 on w4" in reasons["w6"]
    assert "7 on w7, 5 on the router" in reasons["w7"]


def test_a_reader_refuses_a_writer_by_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = (worker_pb2.Fingerprint(layout_version=1, protocol_version=v) for v in (5, 4))
    check_fingerprint(ours, theirs)
    theirs.protocol_version = 2
    with pytest.raises(RequestError, match="2 on the other worker, 5 on this one") as caught:
        check_fingerprint(ours, theirs)
    assert caught.value.code is ErrorCode.INCOMPATIBLE_WORKERS


async def test_a_worker_refuses_a_router_by_both_versions_and_keeps_nothing_of_it() -> None:
    hub = AttachHub(worker_pb2.Registration, worker_pb2.Load, lambda _: None, lambda: 0.0)

    async def messages(told: int) -> AsyncIterator[worker_pb2.RouterMessage]:
        yield worker_pb2.RouterMessage(router_id="r9", router_epoch="e", protocol_version=told)

    with pytest.raises(RequestError, match=f"{PROTOCOL_VERSION + 2} on router r9, {PROTOCOL_VERSION} on this worker"):
        await anext(hub.serve(messages(PROTOCOL_VERSION + 2)))
    assert not hub._outboxes
    stream = hub.serve(messages(PROTOCOL_VERSION - 1))
    assert (await anext(stream)).HasField("registration")
    await stream.aclose()


def before(field_numbers: dict[str, set[int]]) -> Any:
    """Registration as a process knows it that was built before these fields (message → numbers) were there."""
    file = descriptor_pb2.FileDescriptorProto()
    worker_pb2.DESCRIPTOR.CopyToProto(file)
    for message in file.message_type:
        kept = [f for f in message.field if f.number not in field_numbers.get(message.name, set())]
        del message.field[:]
        message.field.extend(kept)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("pdray.worker.v1.Registration"))


def test_a_registration_with_fields_of_a_later_version_keeps_its_signature_in_an_older_process() -> None:
    new = worker_pb2.Registration(worker_id="w", epoch="e", spare_transports=["tcp"], issued_at=1.0)
    new.fingerprint.model, new.fingerprint.protocol_version = "m", 1
    sign_registration(new, "secret")
    older = before({"Fingerprint": {7}, "Registration": {17}}).FromString(new.SerializeToString())
    assert not hasattr(older.fingerprint, "protocol_version")
    assert not hasattr(older, "spare_transports")
    signature = older.signature
    older.ClearField("signature")
    again = worker_pb2.Registration.FromString(older.SerializeToString(deterministic=True))
    again.signature = signature
    assert verify_registration(again, "secret")
    assert again == new


def test_a_registration_of_a_process_before_versions_were_told_is_version_0() -> None:
    old = before({"Fingerprint": {7}})(worker_id="w")
    assert worker_pb2.Registration.FromString(old.SerializeToString()).fingerprint.protocol_version == 0
    assert apart(0, PROTOCOL_VERSION, "w", "the router") == ""


def test_the_page_of_versions_ends_with_the_one_in_force() -> None:
    listed = [int(line.split()[0]) for line in (version.__doc__ or "").splitlines() if line.strip()[:1].isdigit()]
    assert listed[-1] == PROTOCOL_VERSION
