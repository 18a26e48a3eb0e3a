"""A scenario as it stands in its file, checked. The pattern is in `prefill_decode.yaml`."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from kvstore.errors import ConfigError

FOLDER = Path(__file__).parent
LOWER, HIGHER, NOT_LOWER, NOT_HIGHER = "lower", "higher", "not_lower", "not_higher"
DIRECTIONS = (LOWER, HIGHER, NOT_LOWER, NOT_HIGHER)
Settings = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How thoroughly a scenario is measured. ``scale``: of the seconds or requests that a case names."""

    rounds: int
    scale: float


FORMS = {
    "tiny": Form(rounds=1, scale=0.25),  # shows that it works, and nothing else
    "short": Form(rounds=3, scale=1.0),
    "long": Form(rounds=7, scale=4.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """A figure of `pdray bench`, and how the candidate's should stand to the baseline's."""

    metric: str
    be: str

    def __post_init__(self) -> None:
        if self.be not in DIRECTIONS:
            raise ConfigError(f"expect.be must be one of {', '.join(DIRECTIONS)}, got {self.be!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Finds the baseline's requests per second first: a closed loop of so many users. The load then is a part of it."""

    users: int
    requests: int
    part: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One load: at a rate (``capacity``, or ``request-rate`` in ``load``) for ``seconds``, or ``requests`` of them."""

    name: str
    load: Mapping[str, Any]  # options of `pdray bench` without their dashes
    expect: Sequence[Expectation]
    seconds: float = 0.0
    requests: int = 0
    capacity: Capacity | None = None
    settings: Settings = field(default_factory=dict)  # of both sides, for this case

    def __post_init__(self) -> None:
        if (self.seconds > 0) == (self.requests > 0):
            raise ConfigError(f"case {self.name!r}: give seconds or requests, above 0")
        if self.seconds > 0 and self.capacity is None and "request-rate" not in self.load:
            raise ConfigError(f"case {self.name!r}: seconds need a capacity or load.request-rate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    name: str
    title: str
    claim: str
    baseline: str
    candidate: str
    sides: Mapping[str, Settings]  # dotted settings of `pdray serve`
    cases: Sequence[Case]
    settings: Settings = field(default_factory=dict)  # of both sides, for all cases
    note: str = ""
    digest: str = ""  # of the file

    def __post_init__(self) -> None:
        if {self.baseline, self.candidate} != set(self.sides) or len(self.sides) != 2:
            raise ConfigError(f"scenario {self.name}: sides must be {self.baseline!r} and {self.candidate!r}")
        if not self.cases:
            raise ConfigError(f"scenario {self.name} has no cases")

    def settings_of(self, side: str, case: Case) -> dict[str, Any]:
        """What `pdray serve` is started with."""
        return {**self.settings, **case.settings, **self.sides[side]}


def names() -> list[str]:
    """Of the scenarios that ship."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_scenario(name_or_file: str) -> Scenario:
    """A scenario by its name, or by the path of a file.

    Raises:
        ConfigError: there is none, or the file is not of that form; the message names the field.
    """
    file = FOLDER / f"{name_or_file}.yaml"
    if not file.is_file():
        file = Path(name_or_file)
    try:
        raw = file.read_bytes()
        data = yaml.safe_load(raw)
    except (OSError, yaml.YAMLError) as exc:
        raise ConfigError(f"scenario {name_or_file}: {exc}; those that ship: {', '.join(names())}") from None
    digest = hashlib.sha256(raw).hexdigest()[:12]
    scenario = _build(Scenario, {"name": file.stem, "digest": digest, **_mapping(data, str(file))}, str(file))
    assert isinstance(scenario, Scenario)
    return scenario


_PARTS = {"expect": Expectation, "cases": Case, "capacity": Capacity}


def _build(kind: type, data: Mapping[str, Any], where: str) -> Any:
    known = {f.name for f in dataclasses.fields(kind)}
    if unknown := sorted(set(data) - known):
        raise ConfigError(f"{where}: {', '.join(unknown)} is no field here; known: {', '.join(sorted(known))}")
    values: dict[str, Any] = {}
    for key, value in data.items():
        part = _PARTS.get(key)
        if part is None or value is None:
            values[key] = value
        elif isinstance(value, list):
            rows = [(_mapping(x, f"{where}: {key}[{i}]"), f"{where}: {key}[{i}]") for i, x in enumerate(value)]
            values[key] = tuple(_build(part, row, at) for row, at in rows)
        else:
            values[key] = _build(part, _mapping(value, f"{where}: {key}"), f"{where}: {key}")
    try:
        return kind(**values)
    except (TypeError, ConfigError) as exc:
        raise ConfigError(f"{where}: {exc}") from None


def _mapping(data: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where} must be a mapping, got {data!r}")
    return data
