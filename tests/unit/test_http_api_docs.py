"""docs/http-api.md: its examples run, and its tables know every route and every field."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from services.router.extras import TEMPLATE_VARIABLES
from services.router.features import KNOWN_WITHOUT_EFFECT, NEVER, NOT_THERE
from services.router.openapi import CHAT, COMPLETION
from services.router.serve import Fronts
from tests.fronts import FakeCore, pooling, saying

TEXT = (Path(__file__).parents[2] / "docs" / "http-api.md").read_text(encoding="utf-8")
EXAMPLES = [(kind, code) for kind, code in re.findall(r"```(bash|python)\n(.*?)```", TEXT, re.DOTALL) if "BASE" in code]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize(("kind", "code"), EXAMPLES, ids=[str(i) for i in range(len(EXAMPLES))])
async def test_an_example_runs(served: tuple[FakeCore, Fronts], kind: str, code: str) -> None:
    core, fronts = served
    core.forget()
    call = '[{"name": "weather", "arguments": {"city": "Rome"}}]'
    core.flow.script = saying(call if "tools" in code else "Hello world", at_once=100)
    if "embeddings" in code:
        core.width, core.flow.script = 2, pooling(defaultdict(lambda: (3.0, 4.0)))
    base = f"http://127.0.0.1:{fronts.http_port}"
    command = ["bash", "-ec", code] if kind == "bash" else [sys.executable, "-c", f"BASE = {base!r}\n{code}"]
    run = await asyncio.to_thread(
        subprocess.run,
        command,
        capture_output=True,
        text=True,
        timeout=120,
        env={"BASE": base, "PATH": "/usr/bin:/bin"},
    )
    assert run.returncode == 0, run.stderr
    assert '"error"' not in run.stdout
    special = {"tools": "weather", "/tokenize": '"tokens"', "embeddings": "0.6"}
    assert next((text for word, text in special.items() if word in code), "Hello") in run.stdout


async def test_every_route_is_in_the_table(served: tuple[FakeCore, Fronts]) -> None:
    for path in served[1].http_app.openapi()["paths"]:
        assert f"{path.replace('{model}', '{id}').replace('{request_id}', '{id}')}`" in TEXT, path


async def test_every_field_is_in_the_table() -> None:
    bodies = [x["requestBody"]["content"]["application/json"]["schema"]["properties"] for x in (CHAT, COMPLETION)]
    known = {name for body in bodies for name in body if not name.startswith("guided_")}
    for name in known | set(KNOWN_WITHOUT_EFFECT) | set(NOT_THERE) | set(NEVER) | set(TEMPLATE_VARIABLES):
        assert re.search(rf"`{name}[`:.]", TEXT), name
