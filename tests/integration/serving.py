"""What tests of a whole server share: a started command whose output is read, and what is left after it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

START_LIMIT_S = 180.0
STOP_LIMIT_S = 40.0
"""Bounds, not expectations: other work may share the machine's two cores."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def until(what: str, check: Callable[[], Any], limit_s: float = 60.0, period_s: float = 0.2) -> Any:
    """The first true value of ``check``; fails with ``what`` when the limit is reached."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if value := check():
            return value
        time.sleep(period_s)
    raise AssertionError(f"not within {limit_s:g} s: {what}")


class Command:
    """A running program in a session of its own; its output is collected, every descendant is remembered."""

    def __init__(self, arguments: list[str], env: dict[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "COLUMNS": "200", **(env or {})},
        )
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._seen: dict[int, psutil.Process] = {}

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def output(self) -> str:
        return "\n".join(self._lines)

    def wait_for(self, pattern: str, limit_s: float = START_LIMIT_S) -> re.Match[str]:
        """The first match in the output so far; fails with the whole output when the program ends or time is up."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            ended = self._process.poll() is not None
            if ended:
                self._reader.join(5)
            if match := re.search(pattern, self.output):
                return match
            if ended:
                break
            time.sleep(0.1)
        raise AssertionError(f"no {pattern!r} in the output:\n{self.output}")

    def descendants(self) -> list[psutil.Process]:
        """All that live now; remembered for `left`."""
        try:
            living = psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        self._seen |= {process.pid: process for process in living}
        return living

    def send(self, number: signal.Signals) -> None:
        self.descendants()
        self._process.send_signal(number)

    def wait(self, limit_s: float = STOP_LIMIT_S) -> int:
        return self._process.wait(limit_s)

    def expect_gone(self, limit_s: float, words: str = "") -> None:
        """Fails with the list of those that live on, of those with these words in their command line."""
        deadline = time.monotonic() + limit_s
        while living := [line for line in self.left() if words in line]:
            assert time.monotonic() < deadline, f"still there after {limit_s:g} s: {living}"
            time.sleep(0.2)

    def left(self) -> list[str]:
        """Descendants that still live, by their command line."""
        found = []
        for process in self._seen.values():
            try:
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(f"{process.pid} {' '.join(process.cmdline())[:120]}")
            except psutil.NoSuchProcess:
                continue
        return found

    def end(self) -> None:
        """Whatever happens in a test, nothing of this command survives it."""
        self.descendants()
        if self._process.poll() is None:
            self._process.kill()
        for process in self._seen.values():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self._process.wait(10)
        self._reader.join(10)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(_COLOUR.sub("", line.rstrip()))


@contextmanager
def running(arguments: list[str], env: dict[str, str] | None = None) -> Iterator[Command]:
    command = Command(arguments, env)
    try:
        yield command
    finally:
        command.end()


def get(url: str) -> Any:
    """The JSON at a URL."""
    with _OPENER.open(url, timeout=30) as reply:
        return json.load(reply)


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with _OPENER.open(request, timeout=120) as reply:
        return json.load(reply)


class Stream:
    """A streamed completion, read in a thread until it ends."""

    def __init__(self, base: str, max_tokens: int) -> None:
        body = {"prompt": "one two three", "max_tokens": max_tokens, "ignore_eos": True, "stream": True, "seed": 1}
        self._request = urllib.request.Request(
            f"{base}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        self.events: list[Any] = []
        self.failure: Exception | None = None
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def begun(self) -> bool:
        if self.failure is not None:
            raise AssertionError(f"the stream failed: {self.failure}")
        return len(self.events) >= 2

    def join(self, limit_s: float = 120.0) -> None:
        self._thread.join(limit_s)
        assert not self._thread.is_alive(), "the stream neither goes on nor ends"

    @property
    def finish_reasons(self) -> list[str]:
        return [
            c["finish_reason"] for e in self.events if e != "[DONE]" for c in e.get("choices", ()) if c["finish_reason"]
        ]

    @property
    def has_ended_properly(self) -> bool:
        """With a finish reason or an error event, and [DONE] last."""
        error = any(event != "[DONE]" and "error" in event for event in self.events)
        return self.failure is None and self.events[-1:] == ["[DONE]"] and (error or bool(self.finish_reasons))

    def _read(self) -> None:
        try:
            with _OPENER.open(self._request, timeout=120) as reply:
                for line in reply:
                    text = line.decode().strip()
                    if text.startswith("data: "):
                        data = text.removeprefix("data: ")
                        self.events.append(data if data == "[DONE]" else json.loads(data))
        except Exception as exc:  # whatever it is, the test shows it
            self.failure = exc


def shared_memory() -> set[str]:
    return {entry.name for entry in Path("/dev/shm").iterdir()}
