"""The chat page and the API page in a real browser."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.protocol.errors import ErrorCode, RequestError
from services.protocol.proto import worker_pb2
from services.router.types import TokenEvent
from tests.fronts import FakeCore, failing, hanging, make_core, running, saying, until
from tests.integration.browser import CHROMIUM, Page, browser

pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason=f"no {CHROMIUM}: the page is tested in Chromium only")

ANSWER = "Hello 안녕 👨‍👩‍👧‍👦 <b>not bold</b>"
LAYERS, BYTES = 30, 3 << 20


class PairCore(FakeCore):
    """Says in /v1/cluster and in each timeline what a prefill and a decode worker would."""

    def cluster(self) -> dict[str, Any]:
        blocks = {"total": 100, "free": 60, "used": 30, "cached": 5, "reserved": 5, "quarantined": 0}
        base = {"state": "ready", "running": 1, "waiting": 0, "blocks": blocks, "reason": ""}
        workers = [{"worker_id": f"{role}-0", "role": role, **base} for role in ("prefill", "decode")]
        return {"redis": {"mode": "embedded"}, "models": [self.card.name], "workers": workers}


def handed_off(core: FakeCore, text: str) -> Any:
    async def script(request: Any) -> AsyncIterator[TokenEvent]:
        timeline = core.timelines.live(request.request_id)
        assert timeline is not None
        timeline.begin_attempt(1, "submit", ("prefill-0", "decode-0"), {})
        await asyncio.sleep(0.02)
        times = worker_pb2.StageTimes(queue_ms=2, kv_load_ms=1, compute_ms=10, transfer_exposed_ms=3)
        timeline.first_token_times(1, times, 0)
        report = {"state": "committed", "bytes": BYTES, "layers": LAYERS, "transport": "mooncake"}
        timeline.handoff_report(worker_pb2.HandoffReport(attempt=1, **report))
        async for event in saying(text)(request):
            yield event
            await asyncio.sleep(0.01)

    return script


@pytest.fixture
def core(tmp_path: Path) -> FakeCore:
    made = make_core(tmp_path, max_model_len=4096)
    return PairCore(made.card, made.config)


async def ask(page: Page, url: str, text: str) -> None:
    await page.goto(url)
    await page.until("document.querySelector('#state').textContent === 'ready'")
    await page.type(text)


async def test_a_chat_in_the_browser_shows_the_answer_and_where_its_time_went(core: FakeCore, tmp_path: Path) -> None:
    core.flow.script = handed_off(core, ANSWER)
    async with running(core) as fronts, browser() as page:
        url = f"http://127.0.0.1:{fronts.http_port}/"
        await ask(page, url, "Say hello")
        await page.until("!!document.querySelector('.answer:not(.live) .bar')")
        assert await page.eval("document.querySelector('.answer .text').textContent") == ANSWER
        facts = await page.eval(
            "Object.fromEntries([...document.querySelectorAll('.fact')]"
            ".map((f) => [f.dataset.name, f.querySelector('b').textContent]))"
        )
        assert (facts["prefill"], facts["decode"]) == ("prefill-0", "decode-0")
        assert facts["layers"] == "30 layers, 3.0 MiB, mooncake"
        assert facts["ttft"].endswith(("ms", " s"))
        assert facts["tpot"].endswith(("ms", " s"))
        parts = await page.eval("[...document.querySelectorAll('.bar .part')].map((p) => p.dataset.name)")
        assert {"prefill", "p_queue", "kv_load", "exposed_transfer", "decode"} <= set(parts)
        widths = await page.eval("[...document.querySelectorAll('.bar .part')].map((p) => p.offsetWidth)")
        assert sum(widths) > 300
        links = await page.eval("[...document.querySelectorAll('nav a')].map((a) => a.getAttribute('href'))")
        assert links == ["docs", "metrics", "v1/cluster"]
        assert await page.eval("document.querySelectorAll('.worker').length") == 2
        await page.screenshot(tmp_path / "chat.png")
        assert page.problems == []
        assert [u for u in page.urls if not u.startswith((url, "data:", "about:"))] == []


async def test_a_second_message_carries_the_first_answer_along(core: FakeCore) -> None:
    core.flow.script = saying("first")
    async with running(core) as fronts, browser() as page:
        await ask(page, f"http://127.0.0.1:{fronts.http_port}/", "one")
        await page.until("!!document.querySelector('.answer:not(.live) .facts')")
        await page.type("two")
        await page.until("document.querySelectorAll('.answer:not(.live) .facts').length === 2")
        assert await fronts.front.text.decode(core.flow.requests[1].prompt_ids) == (
            "user\none\nassistant\nfirst\nuser\ntwo\nassistant\n"
        )
        assert page.problems == []


async def test_a_failed_answer_says_why_and_the_next_one_works(core: FakeCore) -> None:
    core.flow.script = failing(RequestError(ErrorCode.WORKER_LOST, "decode-0 is gone"), after="Hel")
    async with running(core) as fronts, browser() as page:
        await ask(page, f"http://127.0.0.1:{fronts.http_port}/", "hi")
        assert await page.until("document.querySelector('.answer .error')?.textContent") == "decode-0 is gone"
        core.flow.script = saying("fine")
        await page.type("again")
        await page.until("[...document.querySelectorAll('.answer .text')].at(-1).textContent === 'fine'")
        assert page.problems == []


async def test_stop_ends_the_request_on_its_workers(core: FakeCore) -> None:
    core.flow.script = hanging("Hello")
    async with running(core) as fronts, browser() as page:
        await ask(page, f"http://127.0.0.1:{fronts.http_port}/", "hi")
        await page.until("document.querySelector('.answer .text').textContent === 'Hello'")
        await page.eval("document.querySelector('#send').click()")
        await until(lambda: list(core.flow.ends.values()) == ["cancelled"])
        assert await page.until("document.querySelector('.answer .error')?.textContent") == "Stopped."
        assert page.problems == []


async def test_the_api_page_lists_every_route_of_the_document(core: FakeCore) -> None:
    async with running(core) as fronts, browser() as page:
        url = f"http://127.0.0.1:{fronts.http_port}/"
        await page.goto(url + "docs")
        count = await page.eval(
            "fetch('openapi.json').then((r) => r.json())"
            ".then((d) => Object.values(d.paths).flatMap((p) => Object.keys(p)).length)"
        )
        await page.until(f"document.querySelectorAll('details').length === {count}")
        assert "temperature" in await page.eval("document.body.textContent")
        assert page.problems == []
        assert [u for u in page.urls if not u.startswith((url, "data:", "about:"))] == []
