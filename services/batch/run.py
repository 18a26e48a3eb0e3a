"""A batch on its way: so many requests at once, each answer written when it comes."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import openai

from services.batch.lines import BatchAnswer, BatchLine, check_lines, keep_finished, read_lines

Told = Callable[[BatchAnswer], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What to send, and where. ``retries``: of an overloaded or failing server, with the waits it advises."""

    source: Path
    target: Path
    base_url: str  # without /v1
    api_key: str = "none"
    concurrency: int = 16
    timeout_s: float = 3600.0
    retries: int = 5


@dataclass(slots=True)
class Plan:
    """A checked batch: how many lines it has, and which of them are answered already."""

    batch: Batch
    total: int
    finished: set[str]

    @property
    def left(self) -> int:
        return self.total - len(self.finished)


def plan(batch: Batch) -> Plan:
    """Read the input and what earlier runs have answered.

    Raises:
        BadInput: naming lines that cannot be sent; nothing was sent or written then.
        OSError: a file that cannot be read or written.
    """
    ids = check_lines(batch.source)
    batch.target.touch()
    return Plan(batch, len(ids), keep_finished(batch.target) & set(ids))


async def run(planned: Plan, told: Told) -> int:
    """Answer what is left; returns how many lines failed. ``told`` hears of every answer."""
    batch = planned.batch
    lines = (line for line in read_lines(batch.source) if line.custom_id not in planned.finished)
    client = openai.AsyncOpenAI(
        base_url=batch.base_url, api_key=batch.api_key, timeout=batch.timeout_s, max_retries=batch.retries
    )
    with batch.target.open("a", encoding="utf-8") as out:
        async with client:
            workers = [_worker(client, lines, out, told) for _ in range(max(1, min(batch.concurrency, planned.left)))]
            return sum(await asyncio.gather(*workers))


async def _worker(client: openai.AsyncOpenAI, lines: Iterator[BatchLine], out: TextIO, told: Told) -> int:
    failed = 0
    for line in lines:
        answer = await _ask(client, line)
        out.write(answer.to_line())
        out.flush()
        failed += not answer.is_ok
        told(answer)
    return failed


async def _ask(client: openai.AsyncOpenAI, line: BatchLine) -> BatchAnswer:
    request_id = uuid.uuid4().hex
    try:
        body = await client.post(
            line.url, cast_to=object, body=line.body, options={"headers": {"X-Request-Id": request_id}}
        )
    except openai.APIStatusError as exc:
        return BatchAnswer(line.custom_id, request_id, exc.status_code, _error_body(exc))
    except openai.APIError as exc:  # no answer at all, or none that is JSON
        return BatchAnswer(line.custom_id, request_id, error=f"{type(exc).__name__}: {exc.message}")
    return BatchAnswer(line.custom_id, request_id, 200, body)


def _error_body(error: openai.APIStatusError) -> object:
    try:
        return error.response.json()
    except ValueError:
        return {"error": {"message": error.message, "type": "server_error", "param": None, "code": None}}
