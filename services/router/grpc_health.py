"""grpc.health.v1 on the router's own server and behind Serve's gRPC proxy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from grpc_health.v1 import health_pb2

from services.protocol.errors import ErrorCode, RequestError
from services.router.grpc_errors import answering, streaming
from services.router.types import Core

INFERENCE = "pdray.v1.Inference"
OPEN_INFERENCE = "inference.GRPCInferenceService"
READY_NAMES = ("", "readiness", INFERENCE, OPEN_INFERENCE)
LIVE_NAME = "liveness"
WATCH_PERIOD_S = 1.0


class HealthServicer:
    """grpc.health.v1: "liveness" is this process, every other known name is whether a request could be served now."""

    def __init__(self, core: Core, watch_period_s: float = WATCH_PERIOD_S) -> None:
        self._core = core
        self._watch_period_s = watch_period_s

    @answering
    async def Check(self, request: health_pb2.HealthCheckRequest, grpc_context: Any) -> health_pb2.HealthCheckResponse:
        status = self._status(request.service)
        if status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            names = ", ".join(repr(name) for name in (*READY_NAMES, LIVE_NAME))
            raise RequestError(ErrorCode.NOT_FOUND, f"unknown service; known here: {names}")
        return health_pb2.HealthCheckResponse(status=status)

    @streaming
    async def Watch(
        self, request: health_pb2.HealthCheckRequest, grpc_context: Any
    ) -> AsyncGenerator[health_pb2.HealthCheckResponse, None]:
        """The status now and whenever it changes, until the client ends the call."""
        last = None
        while True:
            status = self._status(request.service)
            if status != last:
                yield health_pb2.HealthCheckResponse(status=status)
                last = status
            await asyncio.sleep(self._watch_period_s)

    def _status(self, service: str) -> health_pb2.HealthCheckResponse.ServingStatus:
        known = health_pb2.HealthCheckResponse
        if service == LIVE_NAME:
            return known.SERVING
        if service not in READY_NAMES:
            return known.SERVICE_UNKNOWN
        return known.SERVING if self._core.ready()[0] else known.NOT_SERVING
