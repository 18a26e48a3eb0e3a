"""The chart's README lists every value with its default, and values.yaml explains each."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from tests.deploy.charts import CHART, rendered

VALUES = (CHART / "values.yaml").read_text(encoding="utf-8")
DEFAULTS: dict[str, Any] = yaml.load(VALUES, yaml.CSafeLoader)


def explained() -> dict[str, tuple[Any, str]]:
    """Dotted name → (default, sentence) of each value under a `# -- ` comment."""
    found: dict[str, tuple[Any, str]] = {}
    path: list[tuple[int, str]] = []
    sentence: list[str] = []
    for line in VALUES.splitlines():
        text = line.strip()
        if text.startswith("# -- "):
            sentence = [text[5:]]
        elif text.startswith("# ") and sentence:
            sentence.append(text[2:])
        elif match := re.match(r"( *)([\w-]+):", line):
            indent = len(match[1])
            path = [*[p for p in path if p[0] < indent], (indent, match[2])]
            if sentence:
                dotted = ".".join(name for _, name in path)
                found[dotted] = (default_of(dotted), " ".join(sentence))
                sentence = []
    return found


def default_of(dotted: str) -> Any:
    value: Any = DEFAULTS
    for name in dotted.split("."):
        value = value[name]
    return value


def table() -> list[str]:
    return [
        f"| `{name}` | `{json.dumps(value)}` | {text.replace('|', '/')} |"
        for name, (value, text) in explained().items()
    ]


def leaves(values: dict[str, Any], known: set[str], prefix: str = "") -> list[str]:
    """Values that no comment explains, neither themselves nor a value above them."""
    missing: list[str] = []
    for name, value in values.items():
        dotted = f"{prefix}{name}"
        if dotted in known:
            continue
        missing += leaves(value, known, f"{dotted}.") if isinstance(value, dict) and value else [dotted]
    return missing


def test_every_value_is_explained() -> None:
    assert leaves(DEFAULTS, set(explained())) == []


def test_the_table_of_the_readme_is_that_of_the_values() -> None:
    readme = (CHART / "README.md").read_text(encoding="utf-8")
    rows = [line for line in readme.split("## Values")[1].splitlines() if line.startswith("| `")]
    assert rows == table(), "regenerate it: python -m tests.deploy.test_chart_readme"


def test_the_schema_has_each_value_and_no_other() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))

    def resolve(node: dict[str, Any]) -> dict[str, Any]:
        return dict(schema["$defs"][node["$ref"].rsplit("/", 1)[1]]) if "$ref" in node else node

    def compare(node: dict[str, Any], values: dict[str, Any], path: str) -> None:
        node = resolve(node)
        if "properties" not in node or not values:
            return
        assert set(node["properties"]) - {"global"} == set(values), path
        assert node["additionalProperties"] is False, path
        for name, value in values.items():
            if isinstance(value, dict):
                compare(node["properties"][name], value, f"{path}.{name}")

    compare(schema, DEFAULTS, "values")


@pytest.mark.parametrize("mode", ["rayservice", "plain"])
def test_versions_and_the_image_are_those_of_the_project(mode: str) -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    project = (CHART.parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{chart["appVersion"]}"' in project
    head = rendered({"mode": mode}).objects
    images = {c["image"] for o in head if o["kind"] == "Pod" for c in o["spec"]["containers"]}
    assert images == {f"pdray:{chart['appVersion']}"}


if __name__ == "__main__":
    file = CHART / "README.md"
    head, _, _ = file.read_text(encoding="utf-8").partition("| value | default | what |")
    file.write_text(
        head + "\n".join(["| value | default | what |", "|---|---|---|", *table()]) + "\n", encoding="utf-8"
    )
