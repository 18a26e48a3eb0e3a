"""From options to jobs: which loop it is, when they are due, and which options do not go together."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from kvstore.errors import ConfigError
from services.bench.load.client import CHAT, COMPLETIONS, Form
from services.bench.load.options import parser
from services.bench.load.plan import Plan, make_plan
from services.bench.load.prompts import IdRange, Segment, num_tokens
from services.bench.load.server import tokenizer_ids
from services.bench.load.workloads import Item

LINEAR = ["--ramp-up-strategy", "linear", "--ramp-up-start-rps", "1"]


def plan(*arguments: str) -> Plan:
    return make_plan(parser().parse_args(arguments))


@pytest.fixture
def trace(tmp_path: Path) -> str:
    rows = [
        {"timestamp": 1000 * i, "input_length": 100 * (i + 1), "output_length": 8, "hash_ids": [0]} for i in range(6)
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return str(file)


def test_a_rate_is_an_open_loop_also_with_a_cap() -> None:
    made = plan("--request-rate", "4", "--burstiness", "inf", "--num-prompts", "5", "--max-concurrency", "2")
    assert (made.loop, made.max_concurrency) == ("open", 2)
    assert [job.at_s for job in made.jobs] == pytest.approx([0, 0.25, 0.5, 0.75, 1.0])


def test_a_cap_without_a_rate_is_a_closed_loop() -> None:
    made = plan("--max-concurrency", "2", "--num-prompts", "3")
    assert (made.loop, [job.at_s for job in made.jobs]) == ("closed", [None] * 3)


def test_neither_sends_all_at_once() -> None:
    made = plan("--num-prompts", "3")
    assert (made.loop, [job.at_s for job in made.jobs]) == ("open", [0.0] * 3)


def test_a_ramp_gets_denser() -> None:
    made = plan(
        "--ramp-up-strategy", "linear", "--ramp-up-start-rps", "1", "--ramp-up-end-rps", "9", "--num-prompts", "50",
        "--burstiness", "inf",
    )  # fmt: skip
    at_s = [job.at_s or 0.0 for job in made.jobs]
    gaps = [b - a for a, b in pairwise(at_s)]
    assert gaps == sorted(gaps, reverse=True)
    assert at_s[-1] == pytest.approx(2 * 50 / 10, abs=0.2)


def test_a_trace_has_its_own_times_and_lengths(trace: str) -> None:
    cut = ("--trace-start-s", "2", "--trace-end-s", "5", "--trace-time-scale", "0.5", "--trace-length-scale", "0.1")
    made = plan("--dataset-name", "timed_trace", "--dataset-path", trace, *cut)
    assert [job.at_s for job in made.jobs] == [0, 0.5, 1.0]
    assert [num_tokens(job.item.prompt) for job in made.jobs] == [30, 40, 50]
    assert [job.item.output_tokens for job in made.jobs] == [1, 1, 1]
    assert len(plan("--dataset-name", "timed_trace", "--dataset-path", trace).jobs) == 6
    assert len(plan("--dataset-name", "timed_trace", "--dataset-path", trace, "--num-prompts", "4").jobs) == 4


def test_warm_ups_share_nothing_with_the_run() -> None:
    made = plan("--num-warmups", "3", "--num-prompts", "3", "--random-prefix-len", "8")
    assert len(made.warmups) == 3
    assert made.shared == {0: 0, 1: 8, 2: 8}


def test_the_seed_decides_everything() -> None:
    arguments = ("--request-rate", "4", "--num-prompts", "20", "--random-range-ratio", "0.5", "--seed")
    assert plan(*arguments, "1") == plan(*arguments, "1")
    assert plan(*arguments, "1").jobs != plan(*arguments, "2").jobs


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--dataset-path", "x"], "--dataset-path"),
        (["--dataset-name", "timed_trace"], "--dataset-path"),
        (["--ramp-up-start-rps", "1"], "--ramp-up-strategy"),
        (LINEAR, "--ramp-up-end-rps"),
        (["--random-range-ratio", "1"], "--random-range-ratio"),
        (["--dataset-name", "prefix_repetition", "--prefix-repetition-zipf-alpha", "-1"], "zipf"),
        (
            [*LINEAR, "--ramp-up-end-rps", "2", "--request-rate", "3"],
            "--request-rate",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(arguments: list[str], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        plan(*arguments)


def test_a_trace_takes_no_rate_and_no_empty_cut(trace: str) -> None:
    base = ("--dataset-name", "timed_trace", "--dataset-path", trace)
    with pytest.raises(ConfigError, match="--request-rate"):
        plan(*base, "--request-rate", "1")
    with pytest.raises(ConfigError, match="no request in that cut"):
        plan(*base, "--trace-start-s", "100")
    with pytest.raises(ConfigError, match="--trace-start-s"):
        plan(*base, "--trace-start-s", "5", "--trace-end-s", "5")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--num-prompts", "-1"],
        ["--request-rate", "0"],
        ["--request-rate", "nan"],
        ["--burstiness", "-1"],
        ["--metric-percentiles", "50,101"],
        ["--extra-body", "[1]"],
        ["--extra-body", "{"],
        ["--dataset-name", "sonnet"],
        ["--random-input", "5"],
        ["--trace-start-s", "inf"],
    ],
)
def test_values_that_can_never_work_end_with_code_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(arguments)
    assert ended.value.code == 2


def test_the_help_explains_how_prompts_are_made(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for words in ("prompts by tokens", "common English words", "--goodput", "closed loop", "invalid"):
        assert words in shown


def test_bodies_ask_for_a_stream_with_usage() -> None:
    item = Item((Segment((1,), 5),), 7)
    ids = json.loads(Form(endpoint=COMPLETIONS, model="m", ids=IdRange(10, 20)).body(item))
    assert ids["prompt"] == [x for x in ids["prompt"] if 10 <= x < 20]
    assert (len(ids["prompt"]), ids["max_tokens"], ids["model"]) == (5, 7, "m")
    assert (ids["stream"], ids["stream_options"], ids["ignore_eos"]) == (True, {"include_usage": True}, True)
    plain = Form(endpoint=COMPLETIONS, model="m", ids=None, ignore_eos=False, extra_body={"top_p": 0.5})
    words = json.loads(plain.body(item))
    assert len(words["prompt"].split()) == 5
    assert words["top_p"] == 0.5
    assert "ignore_eos" not in words
    chat = json.loads(Form(endpoint=CHAT, model="m", ids=IdRange(10, 20)).body(item))
    assert chat["messages"] == [{"role": "user", "content": words["prompt"]}]
    assert "prompt" not in chat


def test_a_tokenizer_gives_its_ordinary_ids(tmp_path: Path) -> None:
    data = {
        "model": {"vocab": {f"t{i}": i for i in range(100)}},
        "added_tokens": [{"id": 0}, {"id": 3}, {"id": 98}, {"id": 101}],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    assert tokenizer_ids(tmp_path) == tokenizer_ids(tmp_path / "tokenizer.json") == IdRange(4, 98)
    with pytest.raises(ConfigError, match="--tokenizer"):
        tokenizer_ids(tmp_path / "missing")


def test_the_tool_loads_neither_torch_nor_ray_nor_the_server() -> None:
    script = (
        "import sys, services.bench.load.main\n"
        "heavy = {'torch', 'transformers', 'ray', 'grpc', 'services.router', 'services.engine'} & sys.modules.keys()\n"
        "sys.exit(f'loaded: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
