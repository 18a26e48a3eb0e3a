"""Tensors of the Open Inference Protocol: one-dimensional, in ``contents`` or raw, and what a request says by them.

inputs    text_input (BYTES, one element a prompt), or input_ids (INT64, INT32, UINT32 or UINT64: one prompt)
          sampling_parameters (BYTES, one element: a JSON object), stream (BOOL; only tells that a stream is wanted)
outputs   text_output (BYTES, one element a choice), finish_reason (BYTES)
A request's ``parameters`` are fields of /v1/completions by name: max_tokens, temperature, seed, stop, …
Raw BYTES elements have their length before them, 4 bytes, little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from services.protocol.errors import invalid
from services.protocol.proto import open_inference_pb2 as oip
from services.router.body import parse_object
from services.router.fields import shown

INPUTS = ("text_input", "input_ids", "sampling_parameters", "stream")
OUTPUTS = ("text_output", "finish_reason")
MAX_ELEMENTS = 1 << 20
RESERVED = frozenset({"prompt", "model", "stream", "stream_options"})
_LENGTH = struct.Struct("<I")
_IDS = {
    "INT64": ("<q", "int64_contents"),
    "INT32": ("<i", "int_contents"),
    "UINT64": ("<Q", "uint64_contents"),
    "UINT32": ("<I", "uint_contents"),
}
_Input = oip.ModelInferRequest.InferInputTensor


def completion_body(request: oip.ModelInferRequest) -> dict[str, Any]:
    """The request as a body of /v1/completions.

    Raises:
        RequestError: 400, naming the tensor or parameter at fault.
    """
    body: dict[str, Any] = {}
    for tensor, raw in _paired(request):
        if tensor.name not in INPUTS:
            raise invalid(f"input {shown(tensor.name)} is not known; known are {', '.join(INPUTS)}", "inputs")
        if tensor.name == "text_input":
            body["prompt"] = [_utf8(item, "text_input") for item in _bytes(tensor, raw)]
        elif tensor.name == "input_ids":
            body["prompt"] = _ids(tensor, raw)
        elif tensor.name == "sampling_parameters":
            for item in _bytes(tensor, raw):
                body |= _named(parse_object(item))
    for name, parameter in request.parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        if kind is not None and name not in RESERVED:
            body[name] = getattr(parameter, kind)
    if "prompt" not in body:
        raise invalid("neither text_input nor input_ids is given", "inputs")
    for output in request.outputs:
        if output.name not in OUTPUTS:
            raise invalid(f"output {shown(output.name)} is not known; known are {', '.join(OUTPUTS)}", "outputs")
    if request.model_version not in ("", "1"):
        raise invalid(
            f"model_version {shown(request.model_version)} is not there; the only one is '1'", "model_version"
        )
    body["model"] = request.model_name or None
    return body


def response(
    request: oip.ModelInferRequest, model: str, request_id: str, texts: Sequence[str], reasons: Sequence[str]
) -> oip.ModelInferResponse:
    """The outputs that were asked for, raw where the inputs were; ``texts`` and ``reasons``: one for each choice."""
    message = oip.ModelInferResponse(model_name=model, model_version="1", id=request.id or request_id)
    wanted = {output.name for output in request.outputs} or set(OUTPUTS)
    for name, values in zip(OUTPUTS, (texts, reasons), strict=True):
        if name not in wanted:
            continue
        tensor = message.outputs.add(name=name, datatype="BYTES", shape=[len(values)])
        items = [value.encode() for value in values]
        if request.raw_input_contents:
            message.raw_output_contents.append(b"".join(_LENGTH.pack(len(item)) + item for item in items))
        else:
            tensor.contents.bytes_contents.extend(items)
    return message


def _named(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name not in RESERVED}


def _paired(request: oip.ModelInferRequest) -> Iterator[tuple[_Input, bytes | None]]:
    raws = request.raw_input_contents
    if raws and len(raws) != len(request.inputs):
        raise invalid(
            f"raw_input_contents has {len(raws)} entries for {len(request.inputs)} inputs", "raw_input_contents"
        )
    names = [tensor.name for tensor in request.inputs]
    if len(set(names)) != len(names):
        raise invalid("an input is given twice", "inputs")
    for i, tensor in enumerate(request.inputs):
        if raws and tensor.HasField("contents"):
            raise invalid(f"input {shown(tensor.name)} has contents beside raw_input_contents", "raw_input_contents")
        yield tensor, raws[i] if raws else None


def _count(tensor: _Input) -> int:
    count = 1
    for size in tensor.shape:
        count *= size
        if size < 0 or count > MAX_ELEMENTS:
            raise invalid(f"input {tensor.name} has the shape {list(tensor.shape)[:8]}, which is not usable", "inputs")
    return count


def _checked(tensor: _Input, items: list[Any]) -> list[Any]:
    if len(items) != _count(tensor):
        shape = list(tensor.shape)[:8]
        raise invalid(f"input {tensor.name} has {len(items)} elements, its shape says {shape}", "inputs")
    return items


def _bytes(tensor: _Input, raw: bytes | None) -> list[bytes]:
    if tensor.datatype != "BYTES":
        raise invalid(f"input {tensor.name} must be of type BYTES, got {shown(tensor.datatype)}", "inputs")
    if raw is None:
        return _checked(tensor, list(tensor.contents.bytes_contents))
    items, at = [], 0
    while at < len(raw):
        end = at + _LENGTH.size
        size = _LENGTH.unpack(raw[at:end])[0] if end <= len(raw) else len(raw)
        if end + size > len(raw):
            raise invalid(f"input {tensor.name}: raw_input_contents ends within an element", "raw_input_contents")
        items.append(raw[end : end + size])
        at = end + size
    return _checked(tensor, items)


def _ids(tensor: _Input, raw: bytes | None) -> list[int]:
    if tensor.datatype not in _IDS:
        raise invalid(f"input_ids must be of type {', '.join(_IDS)}, got {shown(tensor.datatype)}", "inputs")
    form, field = _IDS[tensor.datatype]
    if raw is None:
        return _checked(tensor, list(getattr(tensor.contents, field)))
    if len(raw) % struct.calcsize(form):
        raise invalid(f"input_ids: {len(raw)} raw bytes are no whole number of {tensor.datatype}", "raw_input_contents")
    return _checked(tensor, [item[0] for item in struct.iter_unpack(form, raw)])


def _utf8(item: bytes, name: str) -> str:
    try:
        return item.decode("utf-8")
    except UnicodeDecodeError:
        raise invalid(f"input {name} holds text that is not UTF-8", "inputs") from None
