"""Scheduling policies: who goes first among those that wait, and who gives way among those that run.

A policy says in which order queued sequences are looked at, and how `Sequence.order` ranks those that run. The rest is
common: a sequence that finds no room lets later ones pass only so often, one that was preempted or has waited for
``engine.ageing_bound_tokens`` lets none pass, and who needs a block takes it from the last in order.

Each policy's docstring answers three questions, and names after each answer the test that shows it; the table in
docs/scheduling.md is made of them: ``python -m services.engine.policies > docs/scheduling.md``.

Tokens are the clock here: what the engine has computed since a sequence came. No policy reads the time.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import ClassVar

from services.engine.prompt_tree import PromptTree
from services.engine.sequence import Sequence
from services.engine.waiting import HitsLine, Line, RatioLine, SortedLine


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What a policy may look at besides the sequences."""

    count_hits: Callable[[Sequence], int]
    """Tokens of the sequence that are in the prefix cache now."""
    lpm_queue_bound: int


class Policy:
    """What all policies share: first come, first served, where a subclass does not say otherwise."""

    name: ClassVar[str]
    ranks_started: ClassVar[bool] = False
    """One order holds for started, preempted and queued prompts; else started ones go on first, then preempted ones."""
    claims_room: ClassVar[bool] = False
    """A queued sequence may preempt ones of a higher rank in order to start."""

    def rank(self, priority: int) -> int:
        """What goes before arrival in `Sequence.order`."""
        return 0

    def line(self, sight: Sight) -> Line:
        return SortedLine(attrgetter("order"))


class Fcfs(Policy):
    """First come, first served; a request's priority is ignored.

    Starvation: none: nobody who came later is looked at first. Where a request finds no room, at most 32 later ones
    start before it, and none after the ageing bound. [test_the_wait_is_bounded_while_short_prompts_keep_coming]
    Preemption: who needs a block takes it from the latest arrival, which is computed again; the earliest is never
    preempted. At most (blocks grown + requests) × requests at once. [test_preemptions_of_a_finite_load_are_bounded]
    Overload: the queue grows and all wait alike; the time to the first token is that of the whole queue before.
    [test_in_overload_fcfs_starts_all_in_order]
    """

    name = "fcfs"
    ranks_started = True


class Priority(Policy):
    """Lower priority value first, equal ones as they came. With equal priorities it is ``fcfs``.

    Starvation: a less urgent request waits while more urgent ones come, until the ageing bound; from then on it goes
    before all and keeps its blocks. [test_the_wait_is_bounded_while_urgent_requests_keep_coming]
    Preemption: who needs a block takes it from the least urgent, the latest first. A more urgent request that finds no
    room or no slot preempts less urgent ones, once, in order to start; nobody else stops the first in order. At most
    (blocks grown + 2 × requests) × requests at once. [test_preemptions_of_a_finite_load_are_bounded]
    Overload: the urgent keep their times, what is left serves the rest. [test_in_overload_urgent_requests_do_not_wait]
    """

    name = "priority"
    ranks_started = True
    claims_room = True

    def rank(self, priority: int) -> int:
        return priority


class Lpm(Policy):
    """Longest prefix match: most tokens in the prefix cache first, then as they came.

    Starvation: a prompt without a cached prefix waits while ones with longer prefixes come, until the ageing bound.
    [test_the_wait_is_bounded_while_short_prompts_keep_coming]
    Preemption: as ``fcfs``; a preempted request goes before all but aged ones.
    [test_preemptions_of_a_finite_load_are_bounded]
    Overload: with more than ``engine.lpm_queue_bound`` waiting it takes them as they came, as ``fcfs``.
    [test_a_long_queue_makes_lpm_take_requests_as_they_came]
    """

    name = "lpm"

    def line(self, sight: Sight) -> Line:
        return HitsLine(sight.count_hits, sight.lpm_queue_bound)


class DfsWeight(Policy):
    """Depth first through the tree of waiting prompts, the subtree to which more came first: families stay together.

    Starvation: a prompt of a small family waits while larger families grow, until the ageing bound.
    [test_the_wait_is_bounded_while_short_prompts_keep_coming]
    Preemption: as ``fcfs``; a preempted request goes before all but aged ones.
    [test_preemptions_of_a_finite_load_are_bounded]
    Overload: each family computes its common prefix once, then the next one starts.
    [test_in_overload_families_of_prompts_start_together]
    """

    name = "dfs-weight"

    def line(self, sight: Sight) -> Line:
        return PromptTree()


class Lof(Policy):
    """Longest output first: largest max_tokens first, then as they came. Long answers overlap with all others.

    Starvation: a request with a small max_tokens waits while larger ones come, until the ageing bound.
    [test_the_wait_is_bounded_while_long_answers_keep_coming]
    Preemption: as ``fcfs``; a preempted request goes before all but aged ones.
    [test_preemptions_of_a_finite_load_are_bounded]
    Overload: short answers get the worst times: each waits for the ageing bound.
    [test_in_overload_lof_keeps_short_answers_for_last]
    """

    name = "lof"

    def line(self, sight: Sight) -> Line:
        return SortedLine(lambda seq: (-seq.sampling.max_tokens, seq.arrival))


class Hrrn(Policy):
    """Highest response ratio next: tokens computed since arrival, for each token of its own that is not cached.

    Starvation: none by itself: a ratio grows with waiting, and of equal waits the shorter prompt goes first; the ageing
    bound holds besides. [test_the_wait_is_bounded_while_short_prompts_keep_coming]
    Preemption: as ``fcfs``; a preempted request goes before all but aged ones.
    [test_preemptions_of_a_finite_load_are_bounded]
    Overload: every request waits in proportion to what it asks for. [test_in_overload_hrrn_waits_follow_prompt_lengths]
    """

    name = "hrrn"

    def line(self, sight: Sight) -> Line:
        return RatioLine(lambda seq: max(1, seq.num_tokens - sight.count_hits(seq)))


POLICIES: dict[str, Policy] = {p.name: p for p in (Fcfs(), Priority(), Lpm(), DfsWeight(), Lof(), Hrrn())}

_ANSWERS = ("Starvation", "Preemption", "Overload")


@dataclass(frozen=True, slots=True)
class Answer:
    """One cell of the table: what a policy promises, and the test that shows it."""

    text: str
    test: str


def answers_of(policy: Policy) -> tuple[str, dict[str, Answer]]:
    """(what the policy does, answer to each question), read from its docstring."""
    text = " ".join((inspect.getdoc(policy) or "").split())
    what, *parts = re.split(r"(Starvation|Preemption|Overload): ", text)
    found = {}
    for question, answer in zip(parts[::2], parts[1::2], strict=True):
        said = re.fullmatch(r"(.*) \[(test_\w+)\]", answer.strip())
        assert said, f"{policy.name}: no test is named after {question}"
        found[question] = Answer(said[1], said[2])
    assert tuple(found) == _ANSWERS, f"{policy.name} answers {list(found)}"
    return what.strip(), found


def table() -> str:
    """docs/scheduling.md."""
    lines = [
        "# Scheduling policies",
        "",
        "Set with `engine.policy`. Made from the docstrings of `services/engine/policies.py` by "
        "`python -m services.engine.policies`; each cell names the test that shows it.",
        "",
        "| policy | order | starvation bound | preemption | overload |",
        "|---|---|---|---|---|",
    ]
    for policy in POLICIES.values():
        what, answers = answers_of(policy)
        cells = [f"{a.text} (`{a.test}`)" for a in answers.values()]
        lines.append("| " + " | ".join([f"`{policy.name}`", what.replace("``", "`"), *cells]).replace("``", "`") + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table())
