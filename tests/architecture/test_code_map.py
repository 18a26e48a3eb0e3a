"""ARCHITECTURE.md names files and functions that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = re.findall(r"^\| (.+?) \| `([\w/.]+\.py)` \| `([\w.]+)` \|$", (ROOT / "ARCHITECTURE.md").read_text(), re.M)


def names_in(path: Path) -> set[str]:
    """Top-level names of a module, and methods as ``Class.method``."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [x for x in node.body if isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef)]
            found |= {f"{node.name}.{x.name}" for x in methods}
        if isinstance(node, ast.Assign):
            found |= {x.id for x in node.targets if isinstance(x, ast.Name)}
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def test_the_map_is_not_empty() -> None:
    assert len(ROWS) >= 40


@pytest.mark.parametrize(("concept", "file", "name"), ROWS, ids=[f"{f}:{n}" for _, f, n in ROWS])
def test_every_row_names_something_that_exists(concept: str, file: str, name: str) -> None:
    assert (ROOT / file).is_file(), concept
    assert name in names_in(ROOT / file), f"{concept}: {name} is not in {file}"


def test_every_concept_of_the_field_has_a_row() -> None:
    concepts = " ".join(c for c, _, _ in ROWS)
    for word in (
        "unified scheduler", "allocator", "slot mapping", "block identity", "hand-off", "index", "pair policy",
        "paged attention", "chunked prefill", "prefix cache", "eviction", "sampler", "leases", "timeline", "capacity",
    ):  # fmt: skip
        assert word in concepts, word
