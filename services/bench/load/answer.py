"""A streamed answer as it comes in: bytes ─► lines ─► events ─► what they say, each with the time of its bytes.

Lines end with a line feed only: U+2028 and its like are text.
"""

from __future__ import annotations

import json
from array import array
from typing import Any

MAX_LINE_BYTES = 16 * 1024 * 1024
DONE = b"[DONE]"
_decode = json.JSONDecoder().decode  # spares the guess of an encoding, a quarter of the cost


class EventLines:
    """Cuts a byte stream into the payloads of server-sent events."""

    def __init__(self) -> None:
        self._rest = b""
        self._payload: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """Payloads that are complete now. Raises ValueError past MAX_LINE_BYTES without a line's end."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > MAX_LINE_BYTES:
            raise ValueError(f"a line of more than {MAX_LINE_BYTES} bytes")
        found: list[bytes] = []
        for line in lines:
            if line.endswith(b"\r"):
                line = line[:-1]
            if line.startswith(b"data:"):
                self._payload.append(line[6:] if line[5:6] == b" " else line[5:])
            elif not line and self._payload:
                found.append(b"\n".join(self._payload))
                self._payload.clear()
        return found

    def rest(self) -> list[bytes]:
        """What a stream left behind that ends without the last empty line."""
        return self.feed(b"\n\n") if self._rest or self._payload else []


class Answer:
    """What one streamed answer has said so far."""

    def __init__(self, *, keeps_text: bool = False) -> None:
        self._lines = EventLines()
        self._kept: list[str] | None = [] if keeps_text else None
        self.first_s: float | None = None
        self.last_s: float | None = None
        self.chunks = 0
        self.gaps_s: array[float] = array("d")
        self.usage: dict[str, Any] = {}
        self.answer_id = ""
        self.finish_reason = ""
        self.is_done = False  # [DONE] was seen
        self.error = ""  # what the stream itself reported
        self._text_s: float | None = None
        self._end_s: float | None = None

    def feed(self, data: bytes, at_s: float) -> None:
        """Bytes that came at ``at_s``. Raises ValueError for what is no stream of JSON events."""
        for payload in self._lines.feed(data):
            self._event(payload, at_s)

    def close(self, at_s: float) -> None:
        """The connection is through with this answer; the same errors as `feed`."""
        for payload in self._lines.rest():
            self._event(payload, at_s)
        if self.first_s is None:
            self.first_s = self._end_s

    def failure(self) -> str:
        """Why a complete HTTP answer is no success; "" where it is one."""
        if self.error:
            return f"error_event: {self.error[:300]}"
        if self.last_s is None:
            return "empty: the answer held no choice"
        if not self.finish_reason and not self.is_done:
            return "cut_off: the stream ended without a finish reason and without [DONE]"
        return ""

    def count(self, name: str) -> int | None:
        """A number of the usage."""
        return _whole(self.usage.get(name))

    @property
    def text(self) -> str:
        """What it said so far; "" unless it keeps it."""
        return "".join(self._kept or ())

    @property
    def cached_tokens(self) -> int | None:
        details = self.usage.get("prompt_tokens_details")
        return _whole(details.get("cached_tokens")) if isinstance(details, dict) else None

    def _event(self, payload: bytes, at_s: float) -> None:
        if payload == DONE:
            self.is_done = True
            return
        data = _decode(payload.decode())
        if not isinstance(data, dict):
            raise ValueError(f"an event is no JSON object: {payload[:80]!r}")
        if data.get("error"):
            self.error = self.error or _message(data["error"])
            return
        if usage := data.get("usage"):
            self.usage = usage if isinstance(usage, dict) else {}
        if not self.answer_id:
            self.answer_id = str(data.get("id") or "")
        for choice in data.get("choices") or ():
            self._choice(choice, at_s)

    def _choice(self, choice: dict[str, Any], at_s: float) -> None:
        self.last_s = at_s
        if said := _text(choice):
            self.chunks += 1
            if self._kept is not None:
                self._kept.append(str(said))
            if self._text_s is None:
                self.first_s = at_s
            else:
                self.gaps_s.append(at_s - self._text_s)
            self._text_s = at_s
        if reason := choice.get("finish_reason"):
            self.finish_reason = str(reason)
            self._end_s = at_s


def _text(choice: dict[str, Any]) -> Any:
    delta = choice.get("delta")
    if delta is None:
        return choice.get("text")
    return delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _message(error: Any) -> str:
    return str(error.get("message") or error) if isinstance(error, dict) else str(error)
