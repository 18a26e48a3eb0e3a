"""What each route and RPC asks of its caller. What no line names is the administrators': a new one begins closed."""

from __future__ import annotations

from dataclasses import dataclass

from services.router.access.keys import ADMIN, INFER, METRICS

ANY_KEY = frozenset({INFER, METRICS, ADMIN})


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """``scopes``: one of them is enough; None: no key is asked for. ``is_counted``: limits count it as a request."""

    scopes: frozenset[str] | None
    is_counted: bool = False


OPEN = Rule(scopes=None)
ANYBODY = Rule(scopes=ANY_KEY)
READ = Rule(scopes=frozenset({INFER}))
WORK = Rule(scopes=frozenset({INFER}), is_counted=True)
WATCH = Rule(scopes=frozenset({METRICS, ADMIN}))
ADMINISTER = Rule(scopes=frozenset({ADMIN}))

_PROBES = frozenset({"/health", "/ready"})
_PAGES = frozenset({"/", "/docs", "/openapi.json"})
_WORK = frozenset({"/tokenize", "/detokenize", "/score"})
_ADMIN_V1 = "/v1/cluster"

_INFERENCE, _OIP = "/pdray.v1.Inference/", "/inference.GRPCInferenceService/"
RPCS: dict[str, Rule] = {
    **dict.fromkeys((f"/grpc.health.v1.Health/{name}" for name in ("Check", "Watch", "List")), OPEN),
    **dict.fromkeys((f"{_INFERENCE}{name}" for name in ("Generate", "Chat", "Embed", "Tokenize")), WORK),
    **dict.fromkeys((f"{_INFERENCE}{name}" for name in ("GetModel", "Abort")), READ),
    f"{_INFERENCE}GetLoad": WATCH,
    **dict.fromkeys((f"{_OIP}{name}" for name in ("ServerLive", "ServerReady", "ModelReady")), OPEN),
    **dict.fromkeys((f"{_OIP}{name}" for name in ("ServerMetadata", "ModelMetadata")), READ),
    f"{_OIP}ModelInfer": WORK,
    f"{_OIP}ModelStreamInfer": READ,  # each request in the stream is counted by itself
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": ANYBODY,
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": ANYBODY,
}
"""By full method name. ServerLive, ServerReady and ModelReady are this protocol's health checks."""


def http_rule(method: str, path: str) -> Rule:
    """The rule of a request line; ``path`` is what the router of the app matches, without a prefix."""
    is_read = method in ("GET", "HEAD")
    if path in _PROBES and is_read:
        return OPEN
    if path in _PAGES and is_read:
        return ANYBODY
    if path == "/metrics" and is_read:
        return WATCH
    if path.rstrip("/") == _ADMIN_V1 or path.startswith(_ADMIN_V1 + "/"):
        return ADMINISTER
    if path.startswith("/v1/") or path in _WORK:
        return READ if is_read else WORK
    return ADMINISTER


def rpc_rule(full_method: str) -> Rule:
    """The rule of ``/package.Service/Method``."""
    return RPCS.get(full_method, ADMINISTER)
