"""The `openai` package of npm streams a chat, unchanged."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.fronts import make_core, running, saying

SCRIPT = """
import OpenAI from "openai";
const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "none", maxRetries: 0 });
const stream = await client.chat.completions.create({
  model: "tiny", messages: [{ role: "user", content: "Hi" }], stream: true, stream_options: { include_usage: true },
});
let text = "", usage = null, reason = null;
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta?.content ?? "";
  reason = chunk.choices[0]?.finish_reason ?? reason;
  usage = chunk.usage ?? usage;
}
console.log(JSON.stringify({ text, reason, usage }));
"""

pytestmark = pytest.mark.skipif(
    shutil.which("node") is None or shutil.which("npm") is None, reason="node and npm are not there"
)


@pytest.mark.slow
async def test_the_node_client_streams_a_chat(tmp_path: Path) -> None:
    (tmp_path / "package.json").write_text('{"type": "module", "private": true}', encoding="utf-8")
    install = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "openai@^7"]
    done = await asyncio.to_thread(subprocess.run, install, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    if done.returncode != 0:
        pytest.skip(f"npm cannot install openai here: {done.stderr.strip().splitlines()[-1:]}")
    (tmp_path / "chat.mjs").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "model").mkdir()
    core = make_core(tmp_path / "model")
    core.flow.script = saying("Hello 한국어", cached_tokens=2)
    async with running(core) as fronts:
        base = f"http://127.0.0.1:{fronts.http_port}"
        env = {"PATH": os.defpath + ":/usr/local/bin", "NO_PROXY": "*"}
        run = await asyncio.to_thread(
            subprocess.run,
            [str(shutil.which("node")), "chat.mjs", base],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            env=env,
        )
    assert run.returncode == 0, run.stderr
    said = json.loads(run.stdout)
    assert (said["text"], said["reason"]) == ("Hello 한국어", "stop")
    assert said["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
