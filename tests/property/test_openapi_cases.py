"""Requests made from our own OpenAPI document, right ones and wrong ones: never a 5xx, a hang or a malformed answer."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from tests.fronts import FakeCore, make_core, running, saying_each

ANSWER_LIMIT_S = 20.0
QUICK_EXAMPLES, SLOW_CASES = 4, 20_000
QUICK_PATHS = ("/v1/models/{model}", "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize")
MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)


@contextlib.contextmanager
def served(core: FakeCore) -> Iterator[str]:
    """The fronts in a thread of their own; the address. What `running` finds wrong is raised at the end."""
    ready, done = threading.Event(), asyncio.Event()
    found: dict[str, Any] = {}

    async def serve() -> None:
        async with running(core) as fronts:
            found.update(port=fronts.http_port, loop=asyncio.get_running_loop())
            ready.set()
            await done.wait()

    def main() -> None:
        try:
            asyncio.run(serve())
        except BaseException as exc:
            found["error"] = exc
        finally:
            ready.set()

    thread = threading.Thread(target=main)
    thread.start()
    try:
        ready.wait()
        if "error" not in found:
            yield f"http://127.0.0.1:{found['port']}"
    finally:
        if "loop" in found and "error" not in found:
            found["loop"].call_soon_threadsafe(done.set)
        thread.join()
    if "error" in found:
        raise found["error"]


def core_of(folder: Path) -> FakeCore:
    """A core that answers any number of choices."""
    core = make_core(folder)
    core.flow.script = saying_each(*["Hello world"] * core.config.router.max_n)
    return core


def run_cases(url: str, examples: int, number: int, only: tuple[str, ...] = ()) -> int:
    """So many cases of every operation and mode; how many there were. ``number``: of the run, its seed. ``only``:
    these paths.
    """
    count = 0
    with httpx.Client(base_url=url, timeout=ANSWER_LIMIT_S, trust_env=False) as http:
        schema = schemathesis.openapi.from_dict(http.get("/openapi.json").json())
        for result in schema.get_all_operations():
            operation = result.ok()
            if only and operation.path not in only:
                continue
            for mode in MODES:

                @seed(number)
                @few_settings(examples)
                @given(case=operation.as_strategy(generation_mode=mode))
                def check(case: Any) -> None:
                    nonlocal count
                    count += 1
                    kwargs = case.as_transport_kwargs(base_url=url)
                    request = httpx.Request(
                        kwargs["method"],
                        kwargs["url"],
                        params=kwargs.get("params"),
                        headers=httpx.Headers(list(dict(kwargs.get("headers") or {}).items())),
                        json=kwargs.get("json"),
                        content=kwargs.get("data") if isinstance(kwargs.get("data"), bytes | str) else None,
                    )
                    reply = http.send(request)
                    assert reply.status_code < 500, (request.url, request.content[:2000], reply.text)

                with contextlib.suppress(Unsatisfiable):  # an operation without input has no wrong one
                    check()
    return count


def few_settings(examples: int) -> settings:
    return settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )


def test_a_few_cases_of_each_kind_of_operation(tmp_path: Path) -> None:
    with served(core_of(tmp_path)) as url:
        assert run_cases(url, QUICK_EXAMPLES, 7, QUICK_PATHS) > 10


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_thousand_cases(tmp_path: Path, record_property: Any) -> None:
    slowest_s = 0.0
    with served(core_of(tmp_path)) as url:
        is_over = threading.Event()

        def probe() -> None:
            nonlocal slowest_s
            with httpx.Client(base_url=url, timeout=ANSWER_LIMIT_S, trust_env=False) as http:
                while not is_over.wait(0.05):
                    begin = time.monotonic()
                    assert http.get("/health").status_code == 200
                    slowest_s = max(slowest_s, time.monotonic() - begin)

        prober = threading.Thread(target=probe)
        prober.start()
        try:
            count = number = 0
            while count < SLOW_CASES:
                count += run_cases(url, 100, number)
                number += 1
        finally:
            is_over.set()
            prober.join()
    record_property("slowest_health_s", slowest_s)
