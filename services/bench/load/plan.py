"""From options to a plan: which jobs, due when, in which loop."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.errors import ConfigError
from services.bench.load.arrivals import Ramp, ramped, steady, unit_gaps
from services.bench.load.client import Job
from services.bench.load.prompts import shared_tokens
from services.bench.load.trace import Replay, read_trace
from services.bench.load.workloads import Item, RandomLengths, SharedPrefixes

DEFAULT_PROMPTS = 100
_WARMUP_SEED, _ARRIVAL_SEED = 2**32, 2**33  # apart from any seed that prompts use


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    jobs: Sequence[Job]
    warmups: Sequence[Job]
    loop: str  # open | closed
    max_concurrency: int | None
    shared: dict[int, int]  # job index -> tokens shared with a job before it


def make_plan(options: argparse.Namespace) -> Plan:
    """Raises ConfigError for options that do not go together."""
    items, offsets = _trace(options) if options.dataset_name == "timed_trace" else _made(options)
    jobs = [Job(i, item, None if offsets is None else offsets[i]) for i, item in enumerate(items)]
    warm = _workload(options).items(options.num_warmups, options.seed + _WARMUP_SEED) if options.num_warmups else []
    shared = shared_tokens(item.prompt for item in [*warm, *items])[len(warm) :]
    return Plan(
        jobs=jobs,
        warmups=[Job(-1 - i, item) for i, item in enumerate(warm)],
        loop="closed" if offsets is None else "open",
        max_concurrency=options.max_concurrency,
        shared=dict(enumerate(shared)),
    )


def _made(options: argparse.Namespace) -> tuple[list[Item], list[float] | None]:
    if options.dataset_path is not None:
        raise ConfigError("--dataset-path is for --dataset-name timed_trace")
    count = options.num_prompts or DEFAULT_PROMPTS
    return _workload(options).items(count, options.seed), _offsets(options, count)


def _workload(options: argparse.Namespace) -> RandomLengths | SharedPrefixes:
    """For a trace: short unrelated prompts, for its warm-ups."""
    if options.dataset_name == "prefix_repetition":
        return SharedPrefixes(
            prefix_tokens=options.prefix_repetition_prefix_len,
            suffix_tokens=options.prefix_repetition_suffix_len,
            num_prefixes=options.prefix_repetition_num_prefixes,
            output_tokens=options.prefix_repetition_output_len,
            zipf_alpha=options.prefix_repetition_zipf_alpha,
        )
    if options.dataset_name == "timed_trace":
        return RandomLengths(input_tokens=64, output_tokens=8)
    return RandomLengths(
        input_tokens=options.random_input_len,
        output_tokens=options.random_output_len,
        range_ratio=options.random_range_ratio,
        prefix_tokens=options.random_prefix_len,
    )


def _offsets(options: argparse.Namespace, count: int) -> list[float] | None:
    """None is a closed loop."""
    ramp = _ramp(options)
    if ramp is None and math.isinf(options.request_rate):
        return None if options.max_concurrency else [0.0] * count
    gaps = unit_gaps(count, options.burstiness, np.random.default_rng((options.seed, _ARRIVAL_SEED)))
    at_s = steady(gaps, options.request_rate) if ramp is None else ramped(gaps, ramp)
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
    lines = replay.cut(read_trace(options.dataset_path))[: options.num_prompts]
    if not lines:
        raise ConfigError(f"{options.dataset_path} has no request in that cut")
    return replay.items(lines, options.seed), replay.offsets_s(lines)
