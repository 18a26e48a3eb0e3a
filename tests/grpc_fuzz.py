"""Random and mutated messages for every RPC of a server, from one seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import FieldDescriptor as Field

from services.router.grpc_server import SERVICES

TEXTS = (
    "",
    "x",
    "tiny",
    "Once upon a time",
    "user",
    "assistant",
    "tool",
    "f",
    "required",
    "안녕 👨‍👩‍👧‍👦",
    "\x00\x01\u2028\ufeff",
    "x" * 5000,
    "{",
    '{"type": "object"}',
    '{"a": "\\ud83d"}',
    '{"a": NaN}',
    "[" * 2000,
    '{"$ref": "#"}',
    "(a+)+$",
    'root ::= "a" root',
    "text_input",
    "input_ids",
    "sampling_parameters",
    "BYTES",
    "INT64",
    "temperature",
    "pdray.v1.Inference",
    "text_output",
    "{{ 7 * 7 }}",
)
NUMBERS = (0, 1, 2, 3, 5, 16, 100, 255, -1, -2, 2**31 - 1, -(2**31), 2**32 - 1, 2**63 - 1, -(2**63), 2**64 - 1)
REALS = (0.0, -0.0, 0.5, 1.0, 2.0, 1e-30, 1e30, -1.0, float("nan"), float("inf"), float("-inf"))
RANGES = {
    Field.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    Field.CPPTYPE_UINT32: (0, 2**32 - 1),
    Field.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    Field.CPPTYPE_UINT64: (0, 2**64 - 1),
}
MAX_DEPTH = 5


@dataclass(frozen=True)
class Rpc:
    """One method. ``path``: /package.Service/Method."""

    path: str
    input_type: Any
    takes_stream: bool
    gives_stream: bool


def rpcs() -> list[Rpc]:
    """All methods that the router's server has."""
    pool = descriptor_pool.Default()
    return [
        Rpc(
            f"/{name}/{method.name}",
            message_factory.GetMessageClass(method.input_type),
            method.client_streaming,
            method.server_streaming,
        )
        for name in SERVICES
        for method in pool.FindServiceByName(name).methods
    ]


class Maker:
    """Bytes to send, from one generator of random numbers."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def payload(self, rpc: Rpc) -> bytes:
        """A random message, most often a likely one; sometimes with bytes changed, cut off or added."""
        data: bytes = self._message(rpc.input_type(), 0).SerializeToString()
        if self._rng.random() < 0.3:
            data = self._mutated(data)
        return data

    def _message(self, message: Any, depth: int) -> Any:
        share = self._rng.choice((0.2, 0.5, 0.9))
        for field in message.DESCRIPTOR.fields:
            if self._rng.random() < share and depth < MAX_DEPTH:
                self._fill(message, field, depth)
        return message

    def _fill(self, message: Any, field: Any, depth: int) -> None:
        rng = self._rng
        is_message = field.cpp_type == Field.CPPTYPE_MESSAGE
        if is_message and field.message_type.GetOptions().map_entry:
            key_field, value_field = (
                field.message_type.fields_by_name["key"],
                field.message_type.fields_by_name["value"],
            )
            for _ in range(rng.randrange(4)):
                key = self._value(key_field, "")
                if value_field.cpp_type == Field.CPPTYPE_MESSAGE:
                    self._message(getattr(message, field.name)[key], depth + 1)
                else:
                    getattr(message, field.name)[key] = self._value(value_field, "")
        elif field.is_repeated:
            for _ in range(rng.choice((1, 1, 2, 4, 40))):
                if is_message:
                    self._message(getattr(message, field.name).add(), depth + 1)
                else:
                    getattr(message, field.name).append(self._value(field, field.name))
        elif is_message:
            getattr(message, field.name).SetInParent()
            self._message(getattr(message, field.name), depth + 1)
        else:
            setattr(message, field.name, self._value(field, field.name))

    def _value(self, field: Any, name: str) -> Any:
        rng = self._rng
        if name in ("model", "model_name") and rng.random() < 0.8:
            return rng.choice(("", "tiny"))
        if field.cpp_type == Field.CPPTYPE_STRING:
            text = rng.choice(TEXTS)
            return (
                text
                if field.type == Field.TYPE_STRING
                else rng.choice((text.encode(), rng.randbytes(rng.randrange(9))))
            )
        if field.cpp_type == Field.CPPTYPE_BOOL:
            return rng.random() < 0.5
        if field.cpp_type in RANGES:
            low, high = RANGES[field.cpp_type]
            return min(max(rng.choice(NUMBERS), low), high)
        return rng.choice(REALS)

    def _mutated(self, data: bytes) -> bytes:
        rng, out = self._rng, bytearray(data)
        changes: tuple[Callable[[], None], ...] = (
            lambda: out.__setitem__(rng.randrange(len(out)), rng.randrange(256)) if out else None,
            lambda: out.__delitem__(slice(rng.randrange(len(out) + 1), None)),
            lambda: out.extend(rng.randbytes(rng.randrange(20))),
            lambda: out.__setitem__(slice(0, 0), rng.randbytes(rng.randrange(5))),
        )
        for _ in range(rng.randrange(1, 4)):
            rng.choice(changes)()
        return bytes(out)
