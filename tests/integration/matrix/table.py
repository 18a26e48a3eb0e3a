"""The page of the matrix: what a run of all cells found, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.integration.matrix.design import CELLS, LONG_STOP_S, TWO
from tests.integration.matrix.experiment import IDLE_S, Fault, Result, rung_of
from tests.integration.matrix.phases import PHASES
from tests.integration.matrix.world import FIRST_TOKEN_S, LEASE_S, TOTAL_S

PAGE = Path(__file__).parents[3] / "docs" / "fault-matrix.md"
COMMAND = "pytest tests/integration/matrix --write-fault-matrix"

_HEAD = f"""# Fault matrix

What became of a request when a worker failed under it. Written by `{COMMAND}`, which runs every cell on real processes
(router and workers as `python -m services.*`, a tiny Llama in fp32, transport `tcp`, a lease of {LEASE_S:g} s). A fault
strikes while five requests are in the five phases of one (prefill, decode) pair at the same time; to get there, the
pair's engines are held still for up to a second before, and the wire is slow. Decode workers computed no prompt.

- **P**, **D**: the prefill or the decode worker of that pair fails. *kill*: SIGKILL, replaced when all requests have
  ended. *stop*: its processes stand still (SIGSTOP), for the lease and 5 s more, or for {LONG_STOP_S:g} s. *cut*: its
  network is gone. *restart*: SIGKILL, and at once a new process at the same port.
- *queued*: accepted by P, not begun. *prefill*: P computes the prompt. *transfer*: token 1 is with the client, the KV
  on the wire. *committed*: D has verified the KV and not decoded yet. *decoding*: the client has tokens of D.
- **served** means HTTP 200 with the text of transformers' own greedy tokens, complete. In brackets the rung that
  served: *retarget* (the KV goes to another D), *retry* (from the start on other workers), *migrate* (other workers go
  on behind the tokens that were sent); nothing where the first attempt did. **5xx**: the answer's status, or where
  bytes had been sent, that of the code in the error event before `[DONE]`.
- Seconds are those from sending the request to its end, its undisturbed time among them. Each ended within its budget
  ({FIRST_TOKEN_S:g} s to token 1, {TOTAL_S:g} s in all). *during*: a request that came right after the fault.
  *idle*: seconds until every block of every worker was free or cached again and all of them were accounted for, from
  the last answer or, where the victim went away, from its return; at most {IDLE_S:g} s.
"""
_TITLES = {1: "One pair", TWO: "Two pairs"}


def cell(result: Result, phase: str) -> str:
    """One cell in words."""
    call = result.calls.get(phase)
    if call is None:
        return "–"
    if phase not in result.timelines:
        return "hung" if call.label in result.hung else "–"
    rung = rung_of(result.timelines[phase])
    if call.is_served:
        return f"served{'' if rung == 'none' else f' ({rung})'}, {call.wall_s:.1f} s"
    return f"{call.error_status} `{call.error.get('code', '')}`, {call.wall_s:.1f} s"


def page(results: Mapping[Fault, Result]) -> str:
    parts = [_HEAD]
    columns = (*PHASES, "during")
    for pairs, title in _TITLES.items():
        rule = "---|" * (len(columns) + 2)
        parts.append(f"\n## {title}\n\n| worker, fault | {' | '.join(columns)} | idle |\n|{rule}\n")
        for fault in dict.fromkeys(fault for fault, _ in CELLS if fault.pairs == pairs):
            result = results.get(fault)
            cells = ["not run"] * (len(columns) + 1)
            if result is not None:
                idle = "no" if result.idle_s is None else f"{result.idle_s:.1f} s"
                cells = [*(cell(result, phase) for phase in columns), idle]
            seconds = f" {fault.seconds:g} s" if fault.seconds else ""
            parts.append(f"| {fault.side} {fault.kind}{seconds} | {' | '.join(cells)} |\n")
    return "".join(parts)
