"""From options to a plan: which jobs, due when, in which loop."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.errors import ConfigError
from services.bench.load.arrivals import Ramp, ramped, steady, unit_gaps
from services.bench.load.client import CHAT
from services.bench.load.conversations import MultiTurn
from services.bench.load.job import Job, every
from services.bench.load.pictures import RandomPictures, parse_sizes
from services.bench.load.prompts import num_tokens, shared_tokens
from services.bench.load.sharegpt import ShareGpt, read_sharegpt, tokenizer_count
from services.bench.load.tenants import Tenants
from services.bench.load.trace import Replay, read_trace
from services.bench.load.workloads import Item, RandomLengths, SharedPrefixes

DEFAULT_PROMPTS = 100
MULTI_TURN, SHAREGPT, TRACE, PICTURES = "multi_turn", "sharegpt", "timed_trace", "random-mm"
_WARMUP_SEED, _ARRIVAL_SEED, _CANCEL_SEED = 2**32, 2**33, 2**34  # apart from any seed that prompts use


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """``jobs`` are those that the clock or a user starts; later turns of conversations follow them."""

    jobs: Sequence[Job]
    warmups: Sequence[Job]
    loop: str  # open | closed
    max_concurrency: int | None
    shared: dict[int, int]  # job index -> tokens shared with a job before it; none of later turns

    @property
    def num_requests(self) -> int:
        return sum(1 for _ in every(self.jobs))

    @property
    def input_tokens(self) -> int:
        """Of all prompts, as planned."""
        return sum(num_tokens(job.item.prompt) + job.item.context_tokens for job in every(self.jobs))

    @property
    def num_pictures(self) -> int:
        return sum(len(job.item.pictures) for job in every(self.jobs))

    @property
    def output_tokens(self) -> int:
        return sum(job.item.output_tokens for job in every(self.jobs))


def make_plan(options: argparse.Namespace, tenants: Tenants | None = None) -> Plan:
    """Raises ConfigError for options that do not go together."""
    tenants = tenants or Tenants()
    jobs = _jobs(options, tenants)
    warm = _workload(options).items(options.num_warmups, options.seed + _WARMUP_SEED) if options.num_warmups else []
    shared = shared_tokens([*(item.prompt for item in warm), *(job.item.prompt for job in jobs)])[len(warm) :]
    return Plan(
        jobs=jobs,
        warmups=[Job(-1 - i, item, tenant=tenants.first) for i, item in enumerate(warm)],
        loop="closed" if jobs[0].at_s is None else "open",
        max_concurrency=options.max_concurrency,
        shared={job.index: tokens for job, tokens in zip(jobs, shared, strict=True)},
    )


def _jobs(options: argparse.Namespace, tenants: Tenants) -> list[Job]:
    if options.dataset_path is not None and options.dataset_name not in (TRACE, SHAREGPT):
        raise ConfigError(f"--dataset-path is for --dataset-name {TRACE} or {SHAREGPT}")
    if options.dataset_name == MULTI_TURN:
        jobs = _conversations(options)
    else:
        items, offsets = _trace(options) if options.dataset_name == TRACE else _made(options)
        jobs = [Job(i, item, None if offsets is None else offsets[i]) for i, item in enumerate(items)]
    names = tenants.of_each(len(jobs), options.seed)
    return _with_cancels(options, [_for_tenant(job, name) for job, name in zip(jobs, names, strict=True)])


def _made(options: argparse.Namespace) -> tuple[list[Item], list[float] | None]:
    items = _workload(options).items(options.num_prompts or DEFAULT_PROMPTS, options.seed)
    return items, _offsets(options, len(items), options.request_rate)


def _conversations(options: argparse.Namespace) -> list[Job]:
    """First turns, each with the turns that follow it. Conversations start so often that --request-rate is kept."""
    workload = _workload(options)
    assert isinstance(workload, MultiTurn)
    talks = workload.conversations(options.num_prompts or DEFAULT_PROMPTS, options.seed)
    offsets = _offsets(options, len(talks), options.request_rate / workload.num_turns)
    starts: list[Job] = []
    index = sum(len(turns) for turns in talks)
    for c in reversed(range(len(talks))):
        job: Job | None = None
        for k in reversed(range(len(talks[c]))):
            index -= 1
            turn, at_s = talks[c][k], offsets[c] if offsets is not None and k == 0 else None
            job = Job(index, turn.item, at_s, conversation=c, think_s=turn.think_s, then=job)
        assert job is not None
        starts.append(job)
    return starts[::-1]


def _for_tenant(job: Job, name: str) -> Job:
    if not name:
        return job
    return dataclasses.replace(job, tenant=name, then=None if job.then is None else _for_tenant(job.then, name))


def _with_cancels(options: argparse.Namespace, jobs: list[Job]) -> list[Job]:
    """A part of the requests, drawn by the seed, that the client hangs up on."""
    percent = options.request_cancellation_rate
    if not percent:
        return jobs
    if not 0 < percent <= 100:
        raise ConfigError(f"--request-cancellation-rate is in percent, from 0 to 100, got {percent:g}")
    indices = [job.index for job in every(jobs)]
    rng = np.random.default_rng((options.seed, _CANCEL_SEED))
    drawn = {int(i) for i in rng.permutation(indices)[: round(len(indices) * percent / 100)]}

    def marked(job: Job) -> Job:
        after_s = options.request_cancellation_delay if job.index in drawn else None
        return dataclasses.replace(job, cancel_after_s=after_s, then=None if job.then is None else marked(job.then))

    return [marked(job) for job in jobs]


def _workload(options: argparse.Namespace) -> RandomLengths | SharedPrefixes | MultiTurn | ShareGpt | RandomPictures:
    """For a trace: short unrelated prompts, for its warm-ups."""
    name = options.dataset_name
    if name == "prefix_repetition":
        return SharedPrefixes(
            prefix_tokens=options.prefix_repetition_prefix_len,
            suffix_tokens=options.prefix_repetition_suffix_len,
            num_prefixes=options.prefix_repetition_num_prefixes,
            output_tokens=options.prefix_repetition_output_len,
            zipf_alpha=options.prefix_repetition_zipf_alpha,
        )
    if name == MULTI_TURN:
        return MultiTurn(
            num_turns=options.multi_turn_num_turns,
            first_tokens=options.multi_turn_first_len,
            next_tokens=options.multi_turn_next_len,
            output_tokens=options.multi_turn_output_len,
            prefix_tokens=options.multi_turn_prefix_len,
            think_s=options.multi_turn_think_time_s,
            think_burstiness=options.multi_turn_think_burstiness,
        )
    if name == SHAREGPT:
        if options.dataset_path is None:
            raise ConfigError(f"--dataset-name {SHAREGPT} needs --dataset-path")
        return ShareGpt(
            pairs=read_sharegpt(options.dataset_path),
            count=tokenizer_count(options.tokenizer),
            output_tokens=options.sharegpt_output_len or 0,
        )
    if name == TRACE:
        return RandomLengths(input_tokens=64, output_tokens=8)
    lengths = RandomLengths(
        input_tokens=options.random_input_len,
        output_tokens=options.random_output_len,
        range_ratio=options.random_range_ratio,
        prefix_tokens=options.random_prefix_len,
        long_share=options.random_long_share,
        long_tokens=options.random_long_len,
    )
    return _pictures(options, lengths) if name == PICTURES else lengths


def _pictures(options: argparse.Namespace, lengths: RandomLengths) -> RandomPictures:
    if options.endpoint != CHAT:
        raise ConfigError(f"--dataset-name {PICTURES} needs --endpoint {CHAT}")
    return RandomPictures(
        lengths=lengths,
        per_request=options.random_mm_base_items_per_request,
        range_ratio=options.random_mm_num_mm_items_range_ratio,
        sizes=parse_sizes(options.random_mm_bucket_config),
    )


def _offsets(options: argparse.Namespace, count: int, rate_rps: float) -> list[float] | None:
    """None is a closed loop."""
    ramp = _ramp(options)
    if ramp is None and math.isinf(rate_rps):
        return None if options.max_concurrency else [0.0] * count
    gaps = unit_gaps(count, options.burstiness, np.random.default_rng((options.seed, _ARRIVAL_SEED)))
    at_s = steady(gaps, rate_rps) if ramp is None else ramped(gaps, ramp)
    return [float(x) for x in at_s]


def _ramp(options: argparse.Namespace) -> Ramp | None:
    rates = (options.ramp_up_start_rps, options.ramp_up_end_rps)
    if options.ramp_up_strategy is None:
        if rates != (None, None):
            raise ConfigError("--ramp-up-start-rps and --ramp-up-end-rps need a --ramp-up-strategy")
        return None
    if None in rates:
        raise ConfigError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps")
    if not math.isinf(options.request_rate):
        raise ConfigError("give --request-rate or --ramp-up-strategy, not both")
    if options.dataset_name == MULTI_TURN:
        raise ConfigError(f"--dataset-name {MULTI_TURN} takes a --request-rate, no --ramp-up-strategy")
    return Ramp(strategy=options.ramp_up_strategy, start_rps=rates[0], end_rps=rates[1])


def _trace(options: argparse.Namespace) -> tuple[list[Item], list[float]]:
    if options.dataset_path is None:
        raise ConfigError("--dataset-name timed_trace needs --dataset-path")
    if not math.isinf(options.request_rate) or options.ramp_up_strategy is not None:
        raise ConfigError("a trace has its own times: no --request-rate or --ramp-up-strategy with it")
    replay = Replay(
        start_s=options.trace_start_s,
        end_s=options.trace_end_s,
        time_scale=options.trace_time_scale,
        length_scale=options.trace_length_scale,
    )
    lines = replay.cut(read_trace(options.dataset_path, options.trace_format))[: options.num_prompts]
    if not lines:
        raise ConfigError(f"{options.dataset_path} has no request in that cut")
    return replay.items(lines, options.seed), replay.offsets_s(lines)
