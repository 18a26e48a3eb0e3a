"""What the README shows runs as written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.integration.rig import Cluster

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.M | re.S)


def ported(text: str, cluster: Cluster) -> str:
    return text.replace("127.0.0.1:8000", f"127.0.0.1:{cluster.http_port}").replace(
        "127.0.0.1:9000", f"127.0.0.1:{cluster.grpc_port}"
    )


@pytest.mark.parametrize("example", blocks("python"), ids=["openai", "grpc"])
def test_the_python_examples_answer_paris(example: str, pd_cluster: Cluster) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ported(example, pd_cluster)], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_the_curl_answers_paris(pd_cluster: Cluster) -> None:
    curl = next(b for b in blocks("bash") if b.startswith("curl "))
    body = re.search(r"-d '(.*)'", curl, re.S)
    assert body is not None
    headers = {"Content-Type": "application/json"}
    reply = httpx.post(f"{pd_cluster.url}/v1/chat/completions", content=body[1], headers=headers, timeout=60)
    assert reply.status_code == 200, reply.text
    assert "Paris" in reply.json()["choices"][0]["message"]["content"]


def test_the_order_of_the_readme_is_what_a_newcomer_needs() -> None:
    order = [
        "# pdray", "docs/picture.svg", "## Two commands", "## What it looks like", "## When it helps, and when not",
        "## What works, and what is next", "## Limits", "## Figures",
    ]  # fmt: skip
    places = [README.index(x) for x in order]
    assert places == sorted(places)
    assert "RDMA has not been tested on hardware" in README
    assert "Why tokens do not pass through Ray" in README
    assert (ROOT / "docs/picture.svg").is_file()


def test_every_make_target_and_pdray_command_in_the_readme_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"^make ([a-z-]+)", README, re.M)):
        assert re.search(rf"^{target}:", makefile, re.M), target
    from typer.main import get_command

    from services.cli import app

    commands = set(getattr(get_command(app), "commands", {}))
    assert set(re.findall(r"pdray (serve|doctor|prepare|version|bench)\b", README)) <= commands | {"serve"}
