"""/v1/messages in Anthropic's documents and events. The package of its types is a client's, so they are written here;
the tests read all of them with it.

    message_start ─► (content_block_start ─► content_block_delta* ─► content_block_stop)*
                  ─► message_delta ─► message_stop
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from services.protocol.errors import RequestError
from services.router.answers import Answer, Delta
from services.router.problem import claude_error
from services.router.tools.parsers import CallDelta

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def _event(data: Mapping[str, Any]) -> bytes:
    return f"event: {data['type']}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


class MessageWriter:
    """Writes one message. Feed it every delta."""

    def __init__(self, request_id: str, model: str) -> None:
        self._head: dict[str, Any] = {"id": f"msg_{request_id}", "type": "message", "role": "assistant", "model": model}
        self._blocks: list[dict[str, Any]] = []
        self._pieces: list[str] = []  # of the open block
        self._is_open = False
        self._reason: str | None = None
        self._stop: str | None = None

    def opening(self, answer: Answer) -> bytes:
        """What a stream begins with."""
        message = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None}
        return _event({"type": "message_start", "message": {**message, "usage": _usage(answer, 0)}})

    def delta(self, delta: Delta) -> bytes:
        """Events of what is new."""
        out: list[bytes] = []
        if delta.text:
            if not self._is_open or self._blocks[-1]["type"] != "text":
                out += self._open({"type": "text", "text": ""})
            self._pieces.append(delta.text)
            out.append(self._piece({"type": "text_delta", "text": delta.text}))
        for call in delta.calls:
            out += self._call(call)
        if delta.finish_reason:
            out += self._close()
            self._reason = _REASONS[delta.finish_reason]
            if isinstance(delta.stop, str) and delta.finish_reason == "stop":
                self._reason, self._stop = "stop_sequence", delta.stop
        return b"".join(out)

    def closing(self, answer: Answer) -> bytes:
        """What a stream ends with."""
        end = {"stop_reason": self._reason, "stop_sequence": self._stop}
        usage = _usage(answer, answer.completion_tokens)
        return _event({"type": "message_delta", "delta": end, "usage": usage}) + _event({"type": "message_stop"})

    def failed(self, error: RequestError) -> bytes:
        """What a stream ends with that fails after its start."""
        return _event(claude_error(error))

    def whole(self, answer: Answer) -> bytes:
        """The answer as one document, after its last delta."""
        end = {"stop_reason": self._reason, "stop_sequence": self._stop}
        usage = _usage(answer, answer.completion_tokens)
        return json.dumps({**self._head, "content": self._blocks, **end, "usage": usage}, ensure_ascii=False).encode()

    def _call(self, call: CallDelta) -> list[bytes]:
        out = []
        if call.id:
            out = self._open({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
        self._pieces.append(call.arguments)
        if call.arguments:
            out.append(self._piece({"type": "input_json_delta", "partial_json": call.arguments}))
        return out

    def _open(self, block: dict[str, Any]) -> list[bytes]:
        out = self._close()
        self._blocks.append(block)
        self._is_open = True
        return [*out, _event({"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block})]

    def _piece(self, delta: dict[str, Any]) -> bytes:
        return _event({"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta})

    def _close(self) -> list[bytes]:
        if not self._is_open:
            return []
        block, whole = self._blocks[-1], "".join(self._pieces)
        if block["type"] == "text":
            block["text"] = whole
        else:
            block["input"] = _object(whole)
        self._pieces, self._is_open = [], False
        return [_event({"type": "content_block_stop", "index": len(self._blocks) - 1})]


def _object(text: str) -> dict[str, Any]:
    """The arguments of a call; one that was cut off, or is no object, is told as none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _usage(answer: Answer, output_tokens: int) -> dict[str, int]:
    """Anthropic counts tokens read from the cache apart from the others."""
    return {
        "input_tokens": answer.prompt_tokens - answer.cached_tokens,
        "cache_read_input_tokens": answer.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": output_tokens,
    }
