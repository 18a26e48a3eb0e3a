"""The lines of a batch: requests read and checked, answers written and found again.

Source: OpenAI's batch API; a request is {custom_id, method, url, body}, an answer {id, custom_id, response, error}.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/messages")
MAX_PROBLEMS = 10
MAX_ID_CHARS = 256


class BadInput(Exception):
    """Lines that cannot be sent; the message names the first of them."""


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request."""

    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """What became of one request: the server's answer, or why there is none."""

    custom_id: str
    request_id: str
    status: int = 0  # 0: no answer came
    body: Any = None
    error: str = ""

    @property
    def is_ok(self) -> bool:
        return self.status == 200

    def to_line(self) -> str:
        """The answer in OpenAI's form, with its line break."""
        response = {"status_code": self.status, "request_id": self.request_id, "body": self.body}
        error = {"code": "no_answer", "message": self.error}
        line = {
            "id": f"batch_req_{self.request_id}",
            "custom_id": self.custom_id,
            "response": response if self.status else None,
            "error": None if self.status else error,
        }
        return json.dumps(line, ensure_ascii=False) + "\n"


def read_lines(path: Path) -> Iterator[BatchLine]:
    """Every request of a file, read as they are asked for.

    Raises:
        BadInput: at the first line that cannot be sent.
    """
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, 1):
            if text.strip():
                yield _parse(text, number)


def check_lines(path: Path) -> list[str]:
    """The custom_ids of a file in which every line can be sent.

    Raises:
        BadInput: naming the first lines that cannot.
    """
    problems: list[str] = []
    seen: dict[str, int] = {}
    try:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                if not text.strip():
                    continue
                try:
                    line = _parse(text, number)
                except BadInput as exc:
                    problems.append(str(exc))
                    continue
                if line.custom_id in seen:
                    problems.append(
                        f"line {number}: custom_id {line.custom_id!r} is that of line {seen[line.custom_id]}"
                    )
                seen[line.custom_id] = number
    except UnicodeDecodeError as exc:
        raise BadInput(f"{path} is not valid UTF-8: {exc.reason}") from None
    if problems:
        more = f"\n… and {len(problems) - MAX_PROBLEMS} more" if len(problems) > MAX_PROBLEMS else ""
        raise BadInput("\n".join(problems[:MAX_PROBLEMS]) + more)
    return list(seen)


def _parse(text: str, number: int) -> BatchLine:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise BadInput(f"line {number}: not valid JSON") from None
    if not isinstance(data, dict):
        raise BadInput(f"line {number}: not an object")
    custom_id, url, body = data.get("custom_id"), data.get("url"), data.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID_CHARS:
        raise BadInput(f"line {number}: custom_id must be text of 1 to {MAX_ID_CHARS} characters")
    if data.get("method", "POST") != "POST":
        raise BadInput(f"line {number}: method must be POST")
    if url not in URLS:
        raise BadInput(f"line {number}: url must be one of {', '.join(URLS)}")
    if not isinstance(body, dict):
        raise BadInput(f"line {number}: body must be an object")
    if body.get("stream"):
        raise BadInput(f"line {number}: stream has no place in a batch")
    return BatchLine(custom_id, url, body)


def keep_finished(path: Path) -> set[str]:
    """The custom_ids that a file of answers has good answers for; everything else in it is dropped.

    What is dropped will be asked again: failures, and a line that was cut off when a run was ended.
    """
    if not path.exists():
        return set()
    finished: set[str] = set()
    kept_path = path.with_name(path.name + ".tmp")
    with path.open(encoding="utf-8", errors="replace") as file, kept_path.open("w", encoding="utf-8") as kept:
        for text in file:
            custom_id = _finished_id(text)
            if custom_id is not None and custom_id not in finished:
                finished.add(custom_id)
                kept.write(text)
    os.replace(kept_path, path)
    return finished


def _finished_id(text: str) -> str | None:
    if not text.endswith("\n"):
        return None
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    response = data.get("response") if isinstance(data, dict) else None
    is_ok = isinstance(response, dict) and response.get("status_code") == 200
    custom_id = data.get("custom_id") if is_ok else None
    return custom_id if isinstance(custom_id, str) else None
