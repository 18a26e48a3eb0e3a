"""Which faults a transport injects: rules in a file that a test rewrites while real workers run.

The file's path is the setting ``transfer.device``, the one text that every transport is given and that only the
transport itself reads; so no product code knows of faults, and one file steers all workers of a cluster. Each process
that injects writes what it did to a log of its own beside the file.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

WRITER_FAULTS = (
    "delay",  # hold the write for `seconds`
    "throttle",  # one after another, at `bytes_per_s`
    "reorder",  # hold it for a random part of `seconds`
    "last",  # hold it until its ticket has sent nothing else for `seconds`
    "stall",  # hold it until the channel is closed
    "drop",  # say DONE, send nothing
    "duplicate",  # send it twice; DONE once both are
    "corrupt",  # flip one random bit of the reader's copy after it landed, before DONE is said
    "fail_completion",  # say FAILED, send nothing
    "late",  # say FAILED at once; send it `seconds` later, with what the source holds then, unless closed before
)
CHANNEL_FAULTS = (
    "fail_connect",
    "fail_submit",  # nothing is started
    "unconfirmed_close",  # closing raises; what was held lands `seconds` later, until the reader closes its listener
)
READER_FAULTS = (
    "unfenced",  # revoking a ticket never fences, and lets late bytes land: only closing the listener does
    "broken_fence",  # a transport that breaks its promise: revoking claims to fence, late bytes land all the same
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One fault and the writes that it befalls; the first rule that matches a write takes it."""

    fault: str
    layers: tuple[int, ...] = ()  # none: all
    share: float = 1.0  # of the matching writes, drawn by the seed
    skip: int = 0  # the first matching writes of each ticket go through
    per_ticket: int = 0  # so many of each ticket; 0: no limit
    times: int = 0  # so many in all; 0: no limit
    seconds: float = 0.0
    bytes_per_s: int = 0

    def __post_init__(self) -> None:
        assert self.fault in (*WRITER_FAULTS, *CHANNEL_FAULTS, *READER_FAULTS), self.fault


class Faults:
    """A test's hand on the file."""

    def __init__(self, folder: Path, num_layers: int, seed: int = 0) -> None:
        self.path = folder / "faults.json"
        self._num_layers = num_layers
        self._seed = seed
        self.set()

    def set(self, *rules: Rule) -> None:
        """From the next write on; counts of earlier rules are forgotten."""
        text = json.dumps({"seed": self._seed, "num_layers": self._num_layers, "rules": [asdict(r) for r in rules]})
        draft = self.path.with_suffix(".draft")
        draft.write_text(text)
        draft.replace(self.path)
        self._seed += 1

    def events(self, *names: str) -> list[dict[str, Any]]:
        """What was done so far, oldest first."""
        lines = [line for log in self.path.parent.glob("faults.json.*.log") for line in log.read_text().splitlines()]
        found = [event for event in map(json.loads, lines) if not names or event["event"] in names]
        return sorted(found, key=lambda e: float(e["at_s"]))

    def counts(self) -> Counter[str]:
        return Counter(event["event"] for event in self.events())


class Rules:
    """One version of the file, with what was used up of its limits. For one process, under its owner's lock."""

    def __init__(self, data: dict[str, Any]) -> None:
        known = {f.name for f in fields(Rule)}
        self._rules = [Rule(**{k: tuple(v) if k == "layers" else v for k, v in r.items() if k in known})
                       for r in data.get("rules", ())]  # fmt: skip
        self._seed = int(data.get("seed", 0))
        self.num_layers = int(data.get("num_layers", 1))
        self._used: Counter[tuple[int, str]] = Counter()  # (rule, ticket or "" for all)
        self._seen: Counter[tuple[int, str]] = Counter()

    def first(self, fault: str) -> Rule | None:
        """A rule that is not about single writes, used up by being asked for."""
        for index, rule in enumerate(self._rules):
            if rule.fault == fault and not (rule.times and self._used[index, ""] >= rule.times):
                self._used[index, ""] += 1
                return rule
        return None

    def match(self, layer: int, ticket_id: str) -> tuple[Rule, random.Random] | None:
        """The rule for this write, and the randomness of what it does."""
        for index, rule in self._about_writes():
            if rule.layers and layer not in rule.layers:
                continue
            number = self._seen[index, ""] = self._seen[index, ""] + 1
            of_ticket = self._seen[index, ticket_id] = self._seen[index, ticket_id] + 1
            rng = random.Random(f"{self._seed}:{index}:{number}")
            is_used_up = (rule.times and self._used[index, ""] >= rule.times) or (
                rule.per_ticket and self._used[index, ticket_id] >= rule.per_ticket
            )
            if of_ticket <= rule.skip or is_used_up or rng.random() >= rule.share:
                continue
            self._used[index, ""] += 1
            self._used[index, ticket_id] += 1
            return rule, rng
        return None

    def _about_writes(self) -> Iterator[tuple[int, Rule]]:
        return ((i, r) for i, r in enumerate(self._rules) if r.fault in WRITER_FAULTS)


class Control:
    """A process's view of the file; without a path there are no faults."""

    def __init__(self, path: str) -> None:
        self.path = Path(path) if path else None
        self._version: tuple[int, int] | None = None
        self._rules = Rules({})
        self._log: Any = None

    def rules(self) -> Rules:
        if self.path is not None:
            stat = self.path.stat()
            if self._version != (stat.st_ino, stat.st_mtime_ns):
                self._version = (stat.st_ino, stat.st_mtime_ns)
                self._rules = Rules(json.loads(self.path.read_text()))
        return self._rules

    def note(self, event: str, **detail: Any) -> None:
        if self.path is None:
            return
        if self._log is None:
            self._log = open(f"{self.path}.{os.getpid()}.log", "a", buffering=1, encoding="utf-8")  # noqa: SIM115
        self._log.write(json.dumps({"event": event, "at_s": time.monotonic(), **detail}) + "\n")


def layer_of(offset: int, num_bytes: int, num_layers: int) -> int:
    """Layer that an offset lies in, in a memory of one KV group."""
    return offset * num_layers // num_bytes


__all__: Sequence[str] = ("Control", "Faults", "Rule", "Rules", "layer_of")
