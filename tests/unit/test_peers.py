"""Channels to peers: a new process at an old address is reached at once."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest

from services.protocol.auth import CallAuth
from services.protocol.proto import worker_pb2, worker_pb2_grpc
from services.worker.peers import EPOCHS_KEPT, Peers
from tests.integration.rig import free_ports

SECRET = "s"


class Answers(worker_pb2_grpc.WorkerServicer):
    async def Describe(self, request: worker_pb2.DescribeRequest, context: object) -> worker_pb2.Registration:
        return worker_pb2.Registration(worker_id="w")


async def test_a_new_process_does_not_inherit_the_wait_of_its_predecessors_channel() -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    peers = Peers(SECRET)
    server = grpc.aio.server(interceptors=[CallAuth(SECRET)])
    worker_pb2_grpc.add_WorkerServicer_to_server(Answers(), server)  # type: ignore[no-untyped-call]
    try:
        for _ in range(4):  # nobody is there, and the pause before the next try grows
            with pytest.raises(grpc.aio.AioRpcError):
                await peers.stub(address, "old").Describe(worker_pb2.DescribeRequest(), timeout=2)
        server.add_insecure_port(address)
        await server.start()
        reply = await peers.stub(address, "new").Describe(worker_pb2.DescribeRequest(), timeout=5)
        assert reply.worker_id == "w"
    finally:
        await peers.close()
        await server.stop(None)


async def test_channels_of_older_processes_are_closed() -> None:
    peers = Peers(SECRET)
    for number in range(EPOCHS_KEPT + 3):
        peers.stub("127.0.0.1:1", f"epoch-{number}")
    assert sum(len(channels) for channels in peers._channels.values()) == EPOCHS_KEPT
    await peers.close()
