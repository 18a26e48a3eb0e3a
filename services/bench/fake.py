"""An OpenAI-compatible server with scripted timing and no model: `python -m services.bench.fake --port 8123`.

    request ─► behaviour: defaults ◄ the next of --script ◄ the request's own field "fake" ─► wait ttft ─► chunks ─► end

A behaviour is a JSON object with fields of `Behaviour`. With --slots only so many requests are served at once, in order
of arrival: then its capacity is known, slots divided by the time of one. What came, when, and whether it was answered
to its end, is at /fake/requests. It listens on loopback only; it is for tests of tools and of routers, not for people.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, cast

import httptools
import uvloop

ENDS = ("ok", "error_event", "cut", "empty_200", "http_error", "no_answer")
BLOCK_TOKENS = 16
CHAT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """How one request is answered."""

    ttft_ms: float = 0.0
    itl_ms: float = 0.0  # between chunks
    tokens: int | None = None  # None: as many as max_tokens
    tokens_per_chunk: int = 1  # 0: all in one chunk
    text: str = " word"  # of one token
    end: str = "ok"  # one of ENDS; error_event and cut come after the last chunk
    status: int = 503  # of http_error
    has_usage: bool = True

    def __post_init__(self) -> None:
        if self.end not in ENDS:
            raise ValueError(f"end must be one of {', '.join(ENDS)}, got {self.end!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """A window in which nothing is sent, in seconds since the first request; arrivals are still noted."""

    at_s: float = 0.0
    length_s: float = 0.0


class FakeServer:
    """State that all connections share. Create it inside a running loop."""

    def __init__(
        self,
        default: Behaviour,
        script: list[dict[str, Any]],
        stall: Stall,
        vocab_size: int,
        *,
        slots: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.default, self.script, self.stall, self.vocab_size = default, script, stall, vocab_size
        self.clock = clock
        self.requests: list[dict[str, Any]] = []
        self._slots = asyncio.Semaphore(slots) if slots else None
        self._ids = count()
        self._blocks: set[int] = set()  # names of prompt blocks seen: a cache that never forgets
        self._first_s: float | None = None

    def slot(self) -> AbstractAsyncContextManager[Any]:
        """What a request holds while it is served."""
        return self._slots or nullcontext()

    def open(self, body: dict[str, Any], at_s: float, key: str) -> tuple[str, Behaviour]:
        """Note an arrival, and choose its behaviour. Raises ValueError, TypeError for a wrong one."""
        number = next(self._ids)
        self._first_s = at_s if self._first_s is None else self._first_s
        self.requests.append({"at_s": at_s, "prompt_tokens": len(self.prompt(body)), "key": key, "is_over": False})
        scripted = self.script[number % len(self.script)] if self.script else {}
        return f"cmpl-{number}", dataclasses.replace(self.default, **scripted, **body.get("fake", {}))

    def prompt(self, body: dict[str, Any]) -> list[Any]:
        """Ids, or words of a text; a picture is one."""
        if "messages" in body:
            return [word for message in body["messages"] for word in _words(message.get("content"))]
        prompt = body.get("prompt", "")
        return prompt.split() if isinstance(prompt, str) else list(prompt)

    def hit(self, prompt: list[Any]) -> int:
        """Leading prompt tokens whose blocks were here before; the last token is always computed."""
        name, cached, is_hit = 0, 0, True
        for start in range(0, len(prompt) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            name = hash((name, tuple(prompt[start : start + BLOCK_TOKENS])))
            is_hit = is_hit and name in self._blocks
            cached += BLOCK_TOKENS if is_hit and start + BLOCK_TOKENS < len(prompt) else 0
            self._blocks.add(name)
        return cached

    async def until(self, due_s: float) -> None:
        """Wait for a moment, and past the stall if it lies in it."""
        if self._first_s is not None and self.stall.length_s:
            begin_s = self._first_s + self.stall.at_s
            if begin_s <= due_s < begin_s + self.stall.length_s:
                due_s = begin_s + self.stall.length_s
        while (left_s := due_s - self.clock()) > 0:
            await asyncio.sleep(left_s)


class FakeConnection(asyncio.Protocol):
    """One client; its requests are answered one after the other."""

    def __init__(self, server: FakeServer) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None
        self._reset()

    def _reset(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._url, self._body, self._key = b"", bytearray(), ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._close()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"authorization":
            self._key = value.decode("latin-1").removeprefix("Bearer ")

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        path, body = self._url.decode("latin-1"), bytes(self._body)
        asyncio.get_running_loop().call_soon(self._reset)  # not inside the parser's own callback
        if path in ("/v1/completions", CHAT):
            self._task = asyncio.get_running_loop().create_task(self._serve(path, body, self._key))
        else:
            self._reply(*self._look(path))

    def _look(self, path: str) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"object": "list", "data": [{"id": "fake", "object": "model", "owned_by": "fake"}]}
        if path == "/fake/requests":
            return 200, self._server.requests
        return (200, {"status": "ok"}) if path in ("/health", "/ready") else (404, _error("there is no such route"))

    async def _serve(self, path: str, raw: bytes, key: str) -> None:
        server = self._server
        try:
            body = json.loads(raw)
            answer_id, how = server.open(body, server.clock(), key)
            ids = [x for x in server.prompt(body) if isinstance(x, int)]
        except (ValueError, TypeError, AttributeError) as exc:
            self._reply(400, _error(str(exc)))
            return
        if any(not 0 <= x < server.vocab_size for x in ids):
            self._reply(400, _error(f"token ids lie below {server.vocab_size}"))
            return
        noted = server.requests[-1]
        async with server.slot():
            await self._generate(body, how, _Shape(path == CHAT, answer_id))
        noted["is_over"] = True

    async def _generate(self, body: dict[str, Any], how: Behaviour, shape: _Shape) -> None:
        server, at_s, usage = self._server, self._server.clock(), self._usage(body, how)
        await server.until(at_s + how.ttft_ms / 1000)
        if how.end == "http_error":
            self._reply(how.status, _error("scripted refusal"))
        elif how.end == "empty_200":
            self._send(_head(200, "text/event-stream", 0))
        elif body.get("stream"):
            await self._stream(shape, how, usage, at_s)
        else:
            await server.until(at_s + (how.ttft_ms + how.itl_ms * max(0, usage["completion_tokens"] - 1)) / 1000)
            self._reply(200, shape.whole(how.text * usage["completion_tokens"], usage if how.has_usage else None))

    def _usage(self, body: dict[str, Any], how: Behaviour) -> dict[str, Any]:
        prompt = self._server.prompt(body)
        tokens = how.tokens if how.tokens is not None else int(body.get("max_tokens") or 16)
        return {
            "prompt_tokens": len(prompt),
            "completion_tokens": tokens,
            "total_tokens": len(prompt) + tokens,
            "prompt_tokens_details": {"cached_tokens": self._server.hit(prompt)},
        }

    async def _stream(self, shape: _Shape, how: Behaviour, usage: dict[str, Any], at_s: float) -> None:
        self._send(_head(200, "text/event-stream", None))
        left, number = usage["completion_tokens"], 0
        size = how.tokens_per_chunk or max(1, left)
        while left > 0:
            await self._server.until(at_s + (how.ttft_ms + number * how.itl_ms) / 1000)
            self._send(_chunked(shape.event(how.text * min(size, left), None)))
            left, number = left - size, number + 1
        if how.end == "cut":
            self._close()
            return
        if how.end == "error_event":
            self._send(_chunked(_event(_error("scripted failure"))))
        elif how.end == "ok":
            self._send(_chunked(shape.event("", "length")))
        if how.has_usage and how.end != "error_event":
            self._send(_chunked(shape.usage(usage)))
        self._send(_chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    def _reply(self, status: int, data: Any) -> None:
        body = json.dumps(data).encode()
        self._send(_head(status, "application/json", len(body)) + body)

    def _send(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class _Shape:
    """JSON of one answer, as chat or as completion."""

    def __init__(self, is_chat: bool, answer_id: str) -> None:
        self._is_chat = is_chat
        kind = "chat.completion" if is_chat else "text_completion"
        self._common = {"id": answer_id, "object": kind, "created": 0, "model": "fake"}
        self._chunk = {**self._common, "object": f"{kind}.chunk" if is_chat else kind}

    def event(self, text: str, reason: str | None) -> bytes:
        said: dict[str, Any] = {"delta": {"content": text}} if self._is_chat else {"text": text}
        return _event({**self._chunk, "choices": [{"index": 0, "finish_reason": reason, **said}]})

    def usage(self, usage: dict[str, Any]) -> bytes:
        return _event({**self._chunk, "choices": [], "usage": usage})

    def whole(self, text: str, usage: dict[str, Any] | None) -> dict[str, Any]:
        said: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
        return {**self._common, "choices": [{"index": 0, "finish_reason": "length", **said}], "usage": usage}


def _words(content: Any) -> list[str]:
    if not isinstance(content, list):
        return str(content).split()
    return [w for part in content for w in (str(part["text"]).split() if part.get("type") == "text" else [str(part)])]


def _event(data: Any) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"


def _chunked(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def _head(status: int, content_type: str, length: int | None) -> bytes:
    size = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    return f"HTTP/1.1 {status} Scripted\r\nContent-Type: {content_type}\r\n{size}\r\n\r\n".encode()


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "fake", "param": None, "code": None}}


async def start(server: FakeServer, port: int) -> asyncio.Server:
    """Listen on loopback; port 0 takes a free one."""
    return await asyncio.get_running_loop().create_server(lambda: FakeConnection(server), "127.0.0.1", port)


async def _listen(options: argparse.Namespace, default: Behaviour, script: list[dict[str, Any]], stall: Stall) -> None:
    server = FakeServer(default, script, stall, options.vocab_size, slots=options.slots)
    listening = await start(server, options.port)
    sys.stdout.write(f"listening on http://127.0.0.1:{listening.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await listening.serve_forever()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8123, help="0: a free one; default: %(default)s")
    parser.add_argument("--ttft-ms", type=float, default=0.0)
    parser.add_argument("--itl-ms", type=float, default=0.0)
    parser.add_argument("--tokens-per-chunk", type=int, default=1, help="0: all in one")
    parser.add_argument("--script", type=Path, help="JSON list of behaviours, taken in turn")
    parser.add_argument("--stall-at-s", type=float, default=0.0, help="since the first request")
    parser.add_argument("--stall-s", type=float, default=0.0, help="nothing is sent for so long")
    parser.add_argument("--slots", type=int, default=0, help="requests served at once; 0: all")
    parser.add_argument("--vocab-size", type=int, default=50000, help="token ids from here on are refused")
    options = parser.parse_args()
    default = Behaviour(ttft_ms=options.ttft_ms, itl_ms=options.itl_ms, tokens_per_chunk=options.tokens_per_chunk)
    script = json.loads(options.script.read_text(encoding="utf-8")) if options.script else []
    stall = Stall(at_s=options.stall_at_s, length_s=options.stall_s)
    uvloop.run(_listen(options, default, script, stall))
    return 0


if __name__ == "__main__":
    sys.exit(main())
