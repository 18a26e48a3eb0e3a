"""One client's request over HTTP, and all that the client saw of it."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from services.protocol.errors import STATUS, ErrorCode

SLACK_S = 3.0
"""What a client may see beyond the request's budget: connecting, and a busy machine."""


@dataclass(slots=True)
class Call:
    """``label`` finds it at /debug/requests. Times are monotonic seconds."""

    label: str
    prompt: tuple[int, ...] = field(repr=False)
    max_tokens: int
    is_stream: bool
    salt: str = field(repr=False)
    status: int = 0
    text: str = field(default="", repr=False)
    pieces: int = 0
    error: dict[str, Any] = field(default_factory=dict)
    is_done: bool = False  # a stream ended with [DONE], an answer with its body
    finish_reason: str = ""
    sent_s: float = 0.0
    ended_s: float = 0.0
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def wall_s(self) -> float:
        return self.ended_s - self.sent_s

    @property
    def is_served(self) -> bool:
        return self.status == 200 and not self.error and self.is_done

    @property
    def error_status(self) -> int:
        """Of the HTTP answer, or where a stream had begun, of its error event's code; 0 where there was no error."""
        if self.status != 200:
            return self.status
        return STATUS[ErrorCode(self.error["code"])].http if self.error else 0

    def start(self, url: str, client: httpx.AsyncClient) -> Call:
        self.sent_s = time.monotonic()
        self.task = asyncio.create_task(self._run(url, client), name=self.label)
        return self

    async def end(self, timeout_s: float) -> None:
        """Wait for its end. Raises TimeoutError: the client would hang."""
        assert self.task is not None
        async with asyncio.timeout(timeout_s):
            await asyncio.shield(self.task)

    async def _run(self, url: str, client: httpx.AsyncClient) -> None:
        body = {
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": self.is_stream,
            "cache_salt": self.salt,
        }
        try:
            async with client.stream(
                "POST", f"{url}/v1/completions", json=body, headers={"x-request-id": self.label}
            ) as reply:
                self.status = reply.status_code
                if self.is_stream and reply.status_code == 200:
                    async for line in reply.aiter_lines():
                        self._take(line)
                else:
                    self._take_whole(json.loads(await reply.aread()))
        finally:
            self.ended_s = time.monotonic()

    def _take(self, line: str) -> None:
        if not line.startswith("data: "):
            return
        assert not self.is_done, f"{self.label}: {line} came after [DONE]"
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            self.is_done = True
            return
        told = json.loads(data)
        if "error" in told:
            self.error = told["error"]
            return
        assert not self.error, f"{self.label}: {line} came after the error"
        self._take_choice(told)

    def _take_whole(self, told: dict[str, Any]) -> None:
        self.is_done = True
        if "error" in told:
            self.error = told["error"]
        else:
            self._take_choice(told)

    def _take_choice(self, told: dict[str, Any]) -> None:
        for choice in told.get("choices", []):
            self.text += choice["text"]
            self.pieces += 1
            self.finish_reason = choice["finish_reason"] or self.finish_reason
