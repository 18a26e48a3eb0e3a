"""docs/scheduling.md says what the policies' docstrings say, and every claim names a test that exists."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from services.engine.policies import POLICIES, answers_of, table

ROOT = Path(__file__).parents[2]


def test_the_table_is_up_to_date() -> None:
    again = "run `python -m services.engine.policies > docs/scheduling.md`"
    assert (ROOT / "docs/scheduling.md").read_text(encoding="utf-8") == table(), again


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_claim_names_a_test_that_exists(policy: str) -> None:
    tree = ast.parse((ROOT / "tests/property/test_policies.py").read_text(encoding="utf-8"))
    known = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    _, answers = answers_of(POLICIES[policy])
    assert list(answers) == ["Starvation", "Preemption", "Overload"]
    for question, answer in answers.items():
        assert answer.test in known, f"{policy}, {question}: {answer.test}"
        assert answer.text
