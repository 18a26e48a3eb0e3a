"""The options of `pdray bench`, named as in `vllm bench serve` where they mean the same."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from services.bench.load.client import CHAT, COMPLETIONS
from services.bench.load.trace import AUTO, FORMS

INTRO = """\
Put a load on an OpenAI-compatible server and tell what it did.

  pdray bench --base-url http://127.0.0.1:8000 --request-rate 2 --num-prompts 100 --goodput ttft:2000 tpot:60
  pdray bench sweep   --base-url http://127.0.0.1:8000 --goodput ttft:2000 tpot:80 --random-input-len 512
  pdray bench compare A.json B.json
  pdray bench report  A.json … --output report.html

Open loop, unless --request-rate is inf: requests are sent by the clock, and latency counts from the scheduled send, so
a server (or a --max-concurrency) that makes requests wait is not flattered. With --max-concurrency and no rate it is a
closed loop of that many users. Tokens are those of the server's usage. A run whose client was too late is marked
invalid: exit code 3. The last line of the output is one JSON object.
"""
PROMPTS = """\
prompts by tokens:
  /v1/completions gets token ids where the server takes them: then every prompt has exactly the tokens asked for. The
  ids come from --tokenizer, or from a range that the server accepted (it is asked with one-token prompts first). Where
  it takes none, and for /v1/chat/completions, prompts are common English words, one for each token: most tokenizers
  count them as that, but not all. What counted in the end is in the result: total_input_tokens, from usage.
"""
DATASETS = ("random", "random-mm", "prefix_repetition", "multi_turn", "sharegpt", "timed_trace")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="pdray bench",
        usage="pdray bench [options] | pdray bench {sweep,compare,report,scenario} …",
        description=INTRO,
        epilog=PROMPTS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_load(made)
    add_result(made)
    return made


def add_load(made: argparse.ArgumentParser) -> None:
    """What is asked of which server: the options that a single run and a sweep have in common."""
    _server(made.add_argument_group("server"))
    _load(made.add_argument_group("load"))
    _random(made.add_argument_group("dataset random"))
    _pictures(made.add_argument_group("dataset random-mm: as random, with pictures"))
    _prefixes(made.add_argument_group("dataset prefix_repetition"))
    _turns(made.add_argument_group("dataset multi_turn: conversations, each turn with all that was said before"))
    _sharegpt(made.add_argument_group("dataset sharegpt: a JSON file of conversations, given by --dataset-path"))
    _trace(made.add_argument_group("dataset timed_trace: a file given by --dataset-path"))
    _judging(made.add_argument_group("judging"))


def _server(group: Any) -> None:
    add = group.add_argument
    add("--base-url", default="http://127.0.0.1:8000", help="default: %(default)s")
    add("--endpoint", default=COMPLETIONS, choices=(COMPLETIONS, CHAT), help="default: %(default)s")
    add("--model", help="default: the only model that the server lists")
    add("--tokenizer", type=Path, metavar="PATH", help="tokenizer.json or its folder; see 'prompts by tokens'")
    add("--header", action="append", default=[], metavar="KEY=VALUE", help="sent with every request; repeatable")
    add("--api-key", default="", metavar="KEY|@FILE", help="sent as a bearer token; never saved")
    add("--tenant", action="append", default=[], metavar="NAME=KEY", help="API key, or @FILE; tenants send in turn")
    add("--tenant-weights", type=weights, default=(), metavar="W,W", help="shares of the requests, one per tenant")
    add("--extra-body", type=json_object, default={}, metavar="JSON", help="fields added to every request")
    add("--temperature", type=float, default=0.0, help="default: %(default)s")
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ask for answers of full length; --no-ignore-eos for servers that refuse the field",
    )
    add("--ready-check-timeout-sec", type=seconds, default=60.0, help="wait for /v1/models; default: %(default)s")
    add("--request-timeout-sec", type=positive, default=600.0, help="then a request has failed; default: %(default)s")


def _load(group: Any) -> None:
    add = group.add_argument
    add("--dataset-name", default="random", choices=DATASETS, help="default: %(default)s")
    add("--dataset-path", type=Path)
    add("--num-prompts", type=whole, help="requests; default: 100; of a trace all of the cut")
    add("--request-rate", type=positive, default=math.inf, help="requests per second; default: inf, all at once")
    add("--burstiness", type=positive, default=1.0, help="gamma shape: 1 Poisson (default), inf constant gaps")
    add("--max-concurrency", type=whole, help="requests under way; those that wait for it wait in their latency")
    add("--ramp-up-strategy", choices=("linear", "exponential"), help="instead of a fixed rate")
    add("--ramp-up-start-rps", type=positive)
    add("--ramp-up-end-rps", type=positive)
    add("--request-cancellation-rate", type=float, default=0.0, help="percent that the client hangs up on; default: 0")
    add("--request-cancellation-delay", type=seconds, default=1.0, help="seconds after the send; default: %(default)s")
    add("--num-warmups", type=count, default=0, help="sent before, one by one, and left out; default: %(default)s")
    add("--seed", type=count, default=0, help="of prompts and arrivals; the same seed finds its prompts cached")


def _random(group: Any) -> None:
    add = group.add_argument
    add("--random-input-len", type=whole, default=1024, help="tokens; default: %(default)s")
    add("--random-output-len", type=whole, default=128, help="tokens; default: %(default)s")
    add("--random-range-ratio", type=float, default=0.0, help="lengths vary by this part; default: %(default)s")
    add("--random-prefix-len", type=count, default=0, help="tokens that all prompts begin with; default: %(default)s")
    add("--random-long-share", type=float, default=0.0, help="part of the prompts that are long; default: %(default)s")
    add("--random-long-len", type=whole, default=1500, help="tokens of those; default: %(default)s")


def _pictures(group: Any) -> None:
    add = group.add_argument
    add("--random-mm-base-items-per-request", type=count, default=1, help="pictures; default: %(default)s")
    add("--random-mm-num-mm-items-range-ratio", type=float, default=0.0, help="their number varies by this part")
    sizes = "{(256, 256, 1): 0.5, (720, 1280, 1): 0.5}"
    add("--random-mm-bucket-config", default=sizes, metavar="SIZES", help="height, width, 1; default: %(default)s")


def _prefixes(group: Any) -> None:
    add = group.add_argument
    add("--prefix-repetition-prefix-len", type=whole, default=256, help="default: %(default)s")
    add("--prefix-repetition-suffix-len", type=whole, default=256, help="default: %(default)s")
    add("--prefix-repetition-num-prefixes", type=whole, default=10, help="default: %(default)s")
    add("--prefix-repetition-output-len", type=whole, default=128, help="default: %(default)s")
    add("--prefix-repetition-zipf-alpha", type=float, default=0.0, help="0: prefixes in turn; above: some more often")


def _turns(group: Any) -> None:
    add = group.add_argument
    add("--multi-turn-num-turns", type=whole, default=4, help="of a conversation; default: %(default)s")
    add("--multi-turn-first-len", type=whole, default=256, help="tokens; default: %(default)s")
    add("--multi-turn-next-len", type=whole, default=64, help="new tokens of later turns; default: %(default)s")
    add("--multi-turn-output-len", type=whole, default=64, help="tokens; default: %(default)s")
    add("--multi-turn-prefix-len", type=count, default=0, help="tokens before all conversations; default: %(default)s")
    add("--multi-turn-think-time-s", type=seconds, default=1.0, help="mean, after an answer; default: %(default)s")
    add("--multi-turn-think-burstiness", type=positive, default=1.0, help="gamma shape: 1 exponential, inf constant")


def _sharegpt(group: Any) -> None:
    add = group.add_argument
    add("--sharegpt-output-len", type=whole, help="tokens; default: as many as the answer in the file has")


def _trace(group: Any) -> None:
    add = group.add_argument
    add("--trace-format", default=AUTO, choices=FORMS, help="default: by the first line")
    add("--trace-start-s", type=seconds, default=0.0, help="cut: from here (trace time); default: %(default)s")
    add("--trace-end-s", type=positive, default=math.inf, help="cut: to here; default: %(default)s")
    add("--trace-time-scale", type=positive, default=1.0, help="2: half as fast; default: %(default)s")
    add("--trace-length-scale", type=positive, default=1.0, help="of prompts and answers; default: %(default)s")


def _judging(group: Any) -> None:
    add = group.add_argument
    add("--goodput", nargs="+", default=[], metavar="NAME:MS", help="bounds of a good request: ttft, tpot, e2el")
    add("--metric-percentiles", type=percentiles, default=(50.0, 90.0, 99.0), help="default: 50,90,99")
    add("--max-client-lag-ms", type=positive, default=50.0, help="a p99 above it makes the run invalid; default: 50")
    add("--disable-tqdm", action="store_true", help="no progress")


def add_result(made: argparse.ArgumentParser) -> None:
    """Names for the run, and where it is kept."""
    add = made.add_argument_group("result").add_argument
    add("--label", default="", help="a name for the run, kept in the result")
    add("--metadata", nargs="+", default=[], metavar="KEY=VALUE", help="kept in the result")
    add("--save-result", action="store_true", help="write the JSON line to a file, too")
    add("--save-detailed", action="store_true", help="with each request's times; `compare` needs them, or three runs")
    add("--append-result", action="store_true", help="add the line to the file instead of replacing it")
    add("--result-dir", type=Path, default=Path("."), help="default: the current folder")
    add("--result-filename", default="", help="default: pdray-bench-<time>.json")


def compare_parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="pdray bench compare",
        description=(
            "Compare two sets of runs: B − A with a 95 % interval. With three or more runs (lines) in each file it is "
            "Welch's t interval over runs. Else, with --save-detailed, a bootstrap over blocks of neighbouring "
            "requests: that knows nothing of differences from run to run, so prefer several runs, A and B in turn."
        ),
    )
    made.add_argument("a", type=Path, help="file of JSON lines, or saved by --save-result")
    made.add_argument("b", type=Path)
    made.add_argument("--seed", type=count, default=0, help="of the bootstrap")
    return made


def whole(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value


def count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value


def positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no number from 0")
    return value


def weights(text: str) -> tuple[float, ...]:
    return tuple(float(x) for x in text.split(","))


def percentiles(text: str) -> tuple[float, ...]:
    values = tuple(float(x) for x in text.split(","))
    if not all(0 <= x <= 100 for x in values):
        raise argparse.ArgumentTypeError(f"{text}: percentiles are from 0 to 100")
    return values


def json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("give a JSON object")
    return value
