"""Metrics are declared once and never left over; logs have one format."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from services.protocol.proto import worker_pb2
from services.telemetry.logs import setup_logging
from services.telemetry.metrics import BLOCK_STATES, RouterMetrics, WorkerSample


def families(metrics: RouterMetrics) -> dict[str, list[tuple[dict[str, str], float]]]:
    return {
        f.name: [(s.labels, s.value) for s in f.samples]
        for f in text_string_to_metric_families(metrics.text().decode())
    }


def test_a_worker_is_shown_while_it_is_there_and_leaves_nothing_behind() -> None:
    workers = [WorkerSample("d0", "decode", worker_pb2.Load(running=3, blocks_used=7, tokens_generated=11))]
    metrics = RouterMetrics(lambda: workers)
    shown = families(metrics)
    assert shown["pdray_worker_running"] == [({"role": "decode", "worker": "d0"}, 3.0)]
    assert shown["pdray_worker_tokens_generated"] == [({"role": "decode", "worker": "d0"}, 11.0)]
    assert {labels["state"] for labels, _ in shown["pdray_worker_kv_blocks"]} == set(BLOCK_STATES)
    workers.clear()
    assert families(metrics)["pdray_worker_running"] == []


def test_every_name_is_ours_and_every_metric_says_what_it_is() -> None:
    for family in text_string_to_metric_families(RouterMetrics().text().decode()):
        assert family.name.startswith("pdray_")
        assert len(family.documentation) > 10


def test_two_routers_in_one_process_count_apart() -> None:
    one, two = RouterMetrics(), RouterMetrics()
    one.requests.labels("ok").inc()
    assert two.registry.get_sample_value("pdray_requests_total", {"outcome": "ok"}) is None


@pytest.fixture
def root_restored() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("pdray")
    before = (list(root.handlers), root.level, ours.level)
    yield
    for handler in [h for h in root.handlers if h not in before[0]]:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(before[1])
    ours.setLevel(before[2])


@pytest.mark.usefixtures("root_restored")
def test_a_line_carries_time_level_and_part_and_setting_up_twice_writes_it_once(tmp_path: Path) -> None:
    file = tmp_path / "logs" / "router.log"
    setup_logging("info", file)
    setup_logging("info", file)
    logging.getLogger("pdray.router").info("hello %d", 7)
    logging.getLogger("pdray.router").debug("not shown")
    logging.getLogger("somebody.else").info("not shown either")
    (line,) = file.read_text().splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO    pdray\.router \[\d+\] hello 7", line)


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="log level"):
        setup_logging("loud")
