"""The RPCs as methods of a Serve replica: Serve's gRPC proxy calls them by the last part of their names.

The proxy has no interceptor, so each asks the guard itself. ModelStreamInfer, whose requests are a stream, is served on
the router's own port only.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from grpc_health.v1 import health_pb2

from services.protocol.proto import inference_pb2 as pb
from services.protocol.proto import open_inference_pb2 as oip
from services.router.access.rpc import admitted
from services.router.grpc_health import INFERENCE, OPEN_INFERENCE
from services.router.serve import Fronts

_HEALTH = "grpc.health.v1.Health"


class ProxiedRpcs:
    """Base of the replica, which sets ``_fronts``."""

    _fronts: Fronts

    def refuse_strangers(self, grpc_context: Any) -> None:
        """Raises PermissionError, with the status set, for callers that this router does not serve."""
        raise NotImplementedError

    async def Generate(
        self, request: pb.GenerateRequest, grpc_context: Any
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        async with aclosing(self._many(INFERENCE, "Generate", request, grpc_context)) as messages:
            async for message in messages:
                yield message

    async def Chat(self, request: pb.ChatRequest, grpc_context: Any) -> AsyncGenerator[pb.GenerateResponse, None]:
        async with aclosing(self._many(INFERENCE, "Chat", request, grpc_context)) as messages:
            async for message in messages:
                yield message

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, grpc_context: Any
    ) -> AsyncGenerator[health_pb2.HealthCheckResponse, None]:
        async with aclosing(self._many(_HEALTH, "Watch", request, grpc_context)) as messages:
            async for message in messages:
                yield message

    async def Check(self, request: health_pb2.HealthCheckRequest, grpc_context: Any) -> Any:
        return await self._one(_HEALTH, "Check", request, grpc_context)

    async def Embed(self, request: pb.EmbedRequest, grpc_context: Any) -> Any:
        return await self._one(INFERENCE, "Embed", request, grpc_context)

    async def Tokenize(self, request: pb.TokenizeRequest, grpc_context: Any) -> Any:
        return await self._one(INFERENCE, "Tokenize", request, grpc_context)

    async def GetModel(self, request: pb.GetModelRequest, grpc_context: Any) -> Any:
        return await self._one(INFERENCE, "GetModel", request, grpc_context)

    async def GetLoad(self, request: pb.GetLoadRequest, grpc_context: Any) -> Any:
        return await self._one(INFERENCE, "GetLoad", request, grpc_context)

    async def Abort(self, request: pb.AbortRequest, grpc_context: Any) -> Any:
        return await self._one(INFERENCE, "Abort", request, grpc_context)

    async def ServerLive(self, request: oip.ServerLiveRequest, grpc_context: Any) -> Any:
        return await self._one(OPEN_INFERENCE, "ServerLive", request, grpc_context)

    async def ServerReady(self, request: oip.ServerReadyRequest, grpc_context: Any) -> Any:
        return await self._one(OPEN_INFERENCE, "ServerReady", request, grpc_context)

    async def ModelReady(self, request: oip.ModelReadyRequest, grpc_context: Any) -> Any:
        return await self._one(OPEN_INFERENCE, "ModelReady", request, grpc_context)

    async def ServerMetadata(self, request: oip.ServerMetadataRequest, grpc_context: Any) -> Any:
        return await self._one(OPEN_INFERENCE, "ServerMetadata", request, grpc_context)

    async def ModelMetadata(self, request: oip.ModelMetadataRequest, grpc_context: Any) -> Any:
        return await self._one(OPEN_INFERENCE, "ModelMetadata", request, grpc_context)

    async def ModelInfer(self, request: oip.ModelInferRequest, grpc_context: Any) -> Any:
        return await self._one(OPEN_INFERENCE, "ModelInfer", request, grpc_context)

    async def _one(self, service: str, name: str, request: Any, context: Any) -> Any:
        self.refuse_strangers(context)
        async with admitted(self._fronts.front.guard, f"/{service}/{name}", context):
            return await getattr(self._servicer(service), name)(request, context)

    async def _many(self, service: str, name: str, request: Any, context: Any) -> AsyncGenerator[Any, None]:
        self.refuse_strangers(context)
        guard, rpc = self._fronts.front.guard, getattr(self._servicer(service), name)
        async with admitted(guard, f"/{service}/{name}", context), aclosing(rpc(request, context)) as messages:
            async for message in messages:
                yield message

    def _servicer(self, service: str) -> Any:
        servicers = self._fronts.servicers
        return {INFERENCE: servicers.inference, OPEN_INFERENCE: servicers.open_inference, _HEALTH: servicers.health}[
            service
        ]
