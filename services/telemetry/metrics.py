"""Every metric of pdray, declared once.

Names begin with ``pdray_``. What a worker counted carries the labels role and worker, and is read from the worker's
latest load at scrape time, so a gauge can never be left over from a request that ended. Times are in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Enum, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from services.protocol.proto import worker_pb2

_LATENCY_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_ERROR_RATIOS = (-0.9, -0.75, -0.5, -0.25, -0.1, -0.05, 0.0, 0.05, 0.1, 0.25, 0.5, 1, 2, 4)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10)

INDEX_MODES = ("none", "embedded", "standalone", "sentinel", "cluster", "down")


@dataclass(frozen=True, slots=True)
class WorkerSample:
    """One attached worker as the collector sees it."""

    worker: str
    role: str
    load: worker_pb2.Load


WORKER_GAUGES: dict[str, str] = {
    "running": "Sequences in the running batch.",
    "waiting": "Sequences that wait to be scheduled.",
    "waiting_prefill_tokens": "Prompt tokens admitted and not yet computed.",
    "step_ms": "Moving mean of a decode step, milliseconds.",
    "prefill_tokens_per_s": "Moving mean of prefill speed.",
    "kv_unused_tokens": "Token slots of running sequences' last blocks that hold nothing.",
    "kv_unwritten_blocks": "KV blocks given out for prompts that are not written yet.",
}
WORKER_COUNTERS: dict[str, str] = {
    "prompt_tokens_computed": "Prompt tokens forwarded through the model.",
    "prompt_tokens_cached": "Prompt tokens whose KV was there before the request.",
    "tokens_generated": "Tokens sampled.",
    "tokens_forwarded": "Tokens forwarded: prompt, decode and recomputed together.",
    "decode_tokens_forwarded": "Generated tokens forwarded by decode steps.",
    "tokens_recomputed": "Tokens forwarded again after a preemption or a failure.",
    "preemptions": "Sequences preempted for want of blocks.",
    "output_mispredictions": "Sequences that outgrew what admission had set aside for their output.",
    "loads_failed": "Loads of KV from peers and tiers that brought less than was offered.",
    "admissions_held_back": "Sequences that would have started but for the admission watermark.",
    "pulls": "Times that KV of a prompt was asked of another worker.",
    "pulls_failed": "Of them those that brought nothing, so that the prompt was computed.",
    "pulled_blocks": "KV blocks that other workers wrote here for a prompt, verified.",
}
BLOCK_STATES = ("free", "used", "cached", "reserved", "quarantined")


class WorkerCollector(Collector):
    """Turns the latest loads into metrics when they are scraped; a worker that is gone has no series."""

    def __init__(self, samples: Callable[[], Iterable[WorkerSample]]) -> None:
        self._samples = samples

    def describe(self) -> Iterator[Metric]:
        """Names and texts, without asking for samples: registering happens before there are any."""
        return self._families(())

    def collect(self) -> Iterator[Metric]:
        return self._families(list(self._samples()))

    def _families(self, samples: Sequence[WorkerSample]) -> Iterator[Metric]:
        labels = ("role", "worker")
        for name, text in WORKER_GAUGES.items():
            gauge = GaugeMetricFamily(f"pdray_worker_{name}", text, labels=labels)
            for s in samples:
                gauge.add_metric((s.role, s.worker), float(getattr(s.load, name)))
            yield gauge
        for name, text in WORKER_COUNTERS.items():
            counter = CounterMetricFamily(f"pdray_worker_{name}", text, labels=labels)
            for s in samples:
                counter.add_metric((s.role, s.worker), float(getattr(s.load, name)))
            yield counter
        yield self._blocks(samples)
        yield self._cached_by_source(samples)
        yield self._transfer_failures(samples)

    @staticmethod
    def _blocks(samples: Sequence[WorkerSample]) -> Metric:
        blocks = GaugeMetricFamily(
            "pdray_worker_kv_blocks",
            "KV blocks by state; the states add up to all.",
            labels=("role", "worker", "state"),
        )
        for s in samples:
            for state in BLOCK_STATES:
                blocks.add_metric((s.role, s.worker, state), float(getattr(s.load, f"blocks_{state}")))
        return blocks

    @staticmethod
    def _cached_by_source(samples: Sequence[WorkerSample]) -> Metric:
        cached = CounterMetricFamily(
            "pdray_worker_cached_tokens",
            "Prompt tokens whose KV was there before the request, by where: device, peer, or a tier's name.",
            labels=("role", "worker", "source"),
        )
        for s in samples:
            for source, count in sorted(s.load.cached_by_source.items()):
                cached.add_metric((s.role, s.worker, source), float(count))
        return cached

    @staticmethod
    def _transfer_failures(samples: Sequence[WorkerSample]) -> Metric:
        failures = CounterMetricFamily(
            "pdray_worker_transfer_failures",
            "What failed in transfers of KV, by stage: connect, submit, completion, close, extent, process or plan.",
            labels=("role", "worker", "kind"),
        )
        for s in samples:
            for kind, count in sorted(s.load.transfer_failures.items()):
                failures.add_metric((s.role, s.worker, kind), float(count))
        return failures


class RouterMetrics:
    """What the router counts, in a registry of its own (several routers may live in one process)."""

    def __init__(self, workers: Callable[[], Iterable[WorkerSample]] = tuple) -> None:
        registry = CollectorRegistry(auto_describe=True)
        self.registry = registry
        self.requests = Counter(
            "pdray_requests", "Requests that ended, by outcome: ok, cancelled or an error code.", ["outcome"],
            registry=registry,
        )  # fmt: skip
        self.in_flight = Gauge("pdray_requests_in_flight", "Requests between admission and end.", registry=registry)
        self.prompt_tokens = Counter("pdray_prompt_tokens", "Prompt tokens of finished requests.", registry=registry)
        self.cached_tokens = Counter(
            "pdray_cached_tokens", "Those of them whose KV existed before the request.", registry=registry
        )
        self.key_refusals = Counter(
            "pdray_key_refusals",
            "Callers turned away: key missing, unknown, without the scope, past its limit, or too busy to check.",
            ["reason"], registry=registry,
        )  # fmt: skip
        self.output_tokens = Counter("pdray_output_tokens", "Tokens given to clients.", registry=registry)
        self._declare_times(registry)
        self._declare_promises(registry)
        self._declare_failures(registry)
        registry.register(WorkerCollector(workers))
        ProcessCollector(namespace="pdray_router", registry=registry)

    def _declare_times(self, registry: CollectorRegistry) -> None:
        self.ttft_s = Histogram(
            "pdray_ttft_seconds",
            "Received to first token at the client's socket.",
            buckets=_LATENCY_S,
            registry=registry,
        )
        self.e2e_s = Histogram(
            "pdray_e2e_seconds", "Received to the end of the answer.", buckets=_LATENCY_S, registry=registry
        )
        self.tpot_s = Histogram(
            "pdray_tpot_seconds", "Mean time per token after the first, of answers of at least two tokens.",
            buckets=_TOKEN_S, registry=registry,
        )  # fmt: skip
        self.embed_s = Histogram(
            "pdray_embed_seconds", "Received to the last vector of its request, by text.", buckets=_LATENCY_S,
            registry=registry,
        )  # fmt: skip
        self.itl_s = Histogram(
            "pdray_itl_seconds", "Time between two token messages of a stream.", buckets=_TOKEN_S, registry=registry
        )
        self.queue_s = Histogram(
            "pdray_queue_seconds", "Tokenized to first scheduled on a worker.", buckets=_LATENCY_S, registry=registry
        )
        self.predicted_s = Histogram(
            "pdray_predicted_ttft_seconds", "What was predicted when a request came.", buckets=_LATENCY_S,
            registry=registry,
        )  # fmt: skip

    def _declare_promises(self, registry: CollectorRegistry) -> None:
        self.ttft_error = Histogram(
            "pdray_ttft_prediction_error_ratio", "(predicted − actual) / actual time to the first token.",
            buckets=_ERROR_RATIOS, registry=registry,
        )  # fmt: skip
        self.goodput = Counter(
            "pdray_goodput_requests", "Requests with targets that kept all of them.", registry=registry
        )
        self.slo_misses = Counter(
            "pdray_slo_miss", "Targets that were missed, by the phase that took the most time; failed: an error.",
            ["which", "phase"], registry=registry,
        )  # fmt: skip
        self.refusals = Counter(
            "pdray_admission_refusals",
            "Requests not let in: ttft, tpot or e2e out of reach; bound: too many wait; shed: another took the place.",
            ["reason"],
            registry=registry,
        )
        self.waiting = Gauge("pdray_waiting_requests", "Requests in the router's queue.", registry=registry)
        self.waiting_tokens = Gauge("pdray_waiting_tokens", "Prompt tokens of them.", registry=registry)
        self.circuits_opened = Counter(
            "pdray_circuits_opened", "Times that a worker was taken out for failing again and again.", ["worker"],
            registry=registry,
        )  # fmt: skip

    def _declare_failures(self, registry: CollectorRegistry) -> None:
        self.retries = Counter(
            "pdray_retries",
            "New attempts on other workers, by the error that caused them.",
            ["code"],
            registry=registry,
        )
        self.rungs = Counter(
            "pdray_rungs",
            "What was tried after failures: resend, retarget, retry, migrate, compute_here; fail: nothing was left.",
            ["rung"],
            registry=registry,
        )
        self.retargets = Counter("pdray_retargets", "Hand-offs sent to another decode worker.", registry=registry)
        self.handoff_moves = Counter(
            "pdray_handoff_moves", "Tickets moved along each arrow of the hand-off table, by worker.",
            ["arrow", "worker"], registry=registry,
        )  # fmt: skip
        self.handoff_bytes = Counter(
            "pdray_handoff_bytes", "KV bytes of committed hand-offs.", ["transport"], registry=registry
        )
        self.stale_tokens = Counter(
            "pdray_stale_messages",
            "Outputs of attempts that were over; dropped and answered by Abort.",
            registry=registry,
        )
        self.duplicates_differing = Counter(
            "pdray_duplicates_differing", "Requests failed since two workers disagreed on a token.", registry=registry
        )
        self.worker_losses = Counter(
            "pdray_worker_losses", "Workers lost or stalled, by reason.", ["reason"], registry=registry
        )
        self._declare_view(registry)

    def _declare_view(self, registry: CollectorRegistry) -> None:
        self.redis_up = Gauge("pdray_redis_up", "1 while the block index answers.", registry=registry)
        self.view_gaps_repaired = Counter(
            "pdray_view_gaps_repaired", "Times a worker's set of blocks was read again.", registry=registry
        )
        self.index_ignored = Counter(
            "pdray_index_ignored", "Entries of the index that were junk, unsigned or of unknown workers.",
            registry=registry,
        )  # fmt: skip
        self.index_mode = Enum(
            "pdray_index_mode", "What the block index is, while it answers.", states=INDEX_MODES, registry=registry
        )
        self.view_blocks = Gauge(
            "pdray_view_blocks", "Block names that the router keeps, over all workers.", registry=registry
        )
        self.view_forgotten = Counter(
            "pdray_view_forgotten_blocks", "Block names let go beyond redis.max_blocks.", registry=registry
        )

    def text(self) -> bytes:
        """The exposition in text format 0.0.4."""
        return generate_latest(self.registry)
