"""docs/access.md and docs/grpc-api.md say what is so: the table of limits, the key file, the client's example."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import inspect
import itertools
import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from services import access_config
from services.access_config import LimitsConfig
from services.cli import app
from services.protocol.errors import STATUS
from services.router.access.keys import KeyRing, read_keys
from services.router.access.scopes import RPCS
from tests.fronts import make_core, running

DOCS = Path(__file__).parents[2] / "docs"


def limits_table() -> str:
    """Of every field its setting, default and docstring, in the order of the class."""
    tree = ast.parse(inspect.getsource(access_config))
    body = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "LimitsConfig").body
    told = {
        field.target.id: " ".join(text.value.value.split())
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }
    rows = [
        f"| `limits.{f.name}` | {f.default} | {told[f.name].replace('``', '`')} |"
        for f in dataclasses.fields(LimitsConfig)
    ]
    return "\n".join(["| setting | default | what it bounds |", "|---|---|---|", *rows])


def test_the_table_of_limits_is_the_settings_own() -> None:
    found = re.search(r"<!-- limits -->\n(.*)\n<!-- /limits -->", (DOCS / "access.md").read_text(), re.DOTALL)
    assert found is not None
    assert found[1] == limits_table()


def test_the_key_file_of_the_page_can_be_read() -> None:
    text = next(b for b in re.findall(r"```yaml\n(.*?)```", (DOCS / "access.md").read_text(), re.DOTALL))
    found = read_keys(text.encode())
    assert [key.name for key in found.keys] == ["alice", "prometheus"]


def test_every_rpc_and_status_of_the_page_exists() -> None:
    text = (DOCS / "grpc-api.md").read_text()
    names = {method.rpartition("/")[2] for method in RPCS} - {"List", "ServerReflectionInfo"}
    assert {name for name in names if f"`{name}`" not in text} == set()
    assert {status.grpc for status in STATUS.values() if f"`{status.grpc}`" not in text} == set()


def test_the_clients_example_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = next(b for b in re.findall(r"```python\n(.*?)```", (DOCS / "grpc-api.md").read_text(), re.DOTALL))

    async def main() -> None:
        async with running(make_core(tmp_path)) as fronts:
            await asyncio.to_thread(exec, code, {"ADDRESS": f"127.0.0.1:{fronts.grpc_port}"})

    asyncio.run(main())
    assert capsys.readouterr().out.startswith("Hello worldHello world(")


# --- pdray key ---


def test_a_new_key_opens_what_its_entry_says() -> None:
    made = CliRunner().invoke(
        app, ["key", "new", "--name", "alice", "--tenant", "t", "--scope", "admin", "--scope", "infer"]
    )
    assert made.exit_code == 0
    key = re.search(r"key: (\S+)", made.output)
    assert key is not None
    entry = made.output[made.output.index("  - name") :]
    found = read_keys(f"keys:\n{entry}".encode()).keys[0]
    assert (found.name, found.tenant, found.scopes) == ("alice", "t", {"admin", "infer"})
    assert KeyRing([found]).find(key[1]) is found
    as_json = yaml.safe_load(CliRunner().invoke(app, ["key", "new", "--name", "b", "--json"]).output)
    assert as_json["entry"]["scopes"] == ["infer"]


@pytest.mark.parametrize("arguments", [["--name", ""], ["--name", "a", "--scope", "root"], ["--name", "x" * 200]])
def test_an_entry_that_the_file_would_refuse_is_not_made(arguments: list[str]) -> None:
    made = CliRunner().invoke(app, ["key", "new", *arguments])
    assert made.exit_code == 1
    assert "key: " not in made.output


@pytest.mark.parametrize(("options", "kind"), [([], "sha256:"), (["--scrypt"], "scrypt:")])
def test_a_hash_is_of_the_key_that_was_given(options: list[str], kind: str) -> None:
    made = CliRunner().invoke(app, ["key", "hash", *options], input="my own key\n")
    assert made.output.startswith(kind)
    entry = {"name": "a", "hash": made.output.strip()}
    ring = KeyRing(read_keys(yaml.safe_dump({"keys": [entry]}).encode()).keys)
    assert (ring.find("my own key") or ring.find_slow("my own key")) is not None
    assert CliRunner().invoke(app, ["key", "hash"], input="\n").exit_code == 1
