"""Files and conversations as workloads: what they ask is what the file or the options say."""

from __future__ import annotations

import base64
import io
import json
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from kvstore.errors import ConfigError
from services.bench.load.client import CHAT, COMPLETIONS, Form
from services.bench.load.conversations import MultiTurn
from services.bench.load.job import every
from services.bench.load.options import parser
from services.bench.load.pictures import jpeg, parse_sizes
from services.bench.load.plan import Plan, make_plan
from services.bench.load.prompts import IdRange, num_tokens
from services.bench.load.sharegpt import ShareGpt, estimate, read_sharegpt, tokenizer_count
from services.bench.load.tenants import Tenants
from services.bench.load.trace import AUTO, Replay, read_trace
from services.bench.load.trace_forms import AZURE, BURSTGPT
from services.bench.load.workloads import Picture, RandomLengths

AZURE_ROWS = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-17 00:00:00.0000000,879,0
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:01.017335+00:00,2399,6
"""
BURST_ROWS = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118,GPT-4,417,276,693,API log
"""
TALK = [{"from": "human", "value": "one two three four five"}, {"from": "gpt", "value": "six seven eight nine"}]


def plan(*arguments: str) -> Plan:
    return make_plan(parser().parse_args(arguments))


def saved(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


@pytest.mark.parametrize("form", [AUTO, AZURE])
def test_azure_rows_count_from_the_first(tmp_path: Path, form: str) -> None:
    lines = read_trace(saved(tmp_path, "t.csv", AZURE_ROWS), form)
    assert [round(x.at_s, 5) for x in lines] == [0, 4.31458, 20653.31941]
    assert [(x.input_tokens, x.output_tokens) for x in lines] == [(374, 44), (396, 109), (879, 0)]
    assert Replay().items(lines, 0)[2].output_tokens == 1
    later = read_trace(saved(tmp_path, "u.csv", AZURE_2024))
    assert later[1].at_s == pytest.approx(1.007405)


def test_burstgpt_rows_without_an_answer_are_left_out(tmp_path: Path) -> None:
    lines = read_trace(saved(tmp_path, "b.csv", "\ufeff" + BURST_ROWS))
    assert [(x.at_s, x.input_tokens, x.output_tokens) for x in lines] == [(0, 472, 18), (113, 417, 276)]
    made = plan("--dataset-name", "timed_trace", "--dataset-path", str(tmp_path / "b.csv"), "--trace-time-scale", "0.1")
    assert [job.at_s for job in made.jobs] == pytest.approx([0, 11.3])
    assert [num_tokens(job.item.prompt) for job in made.jobs] == [472, 417]
    assert set(made.shared.values()) == {0}


@pytest.mark.parametrize(
    ("text", "form", "words"),
    [
        (BURST_ROWS, AZURE, "lacks TIMESTAMP"),
        (AZURE_ROWS.replace("396", "x"), AUTO, r"t\.csv:3"),
        (AZURE_ROWS.replace("18:15:50", "18:61:50"), AUTO, r"t\.csv:3"),
        (BURST_ROWS.replace("118,", "1,"), AUTO, r"t\.csv:4: Timestamp lies before"),
        (BURST_ROWS.replace("118,", "nan,"), BURSTGPT, r"t\.csv:4"),
        (AZURE_ROWS.replace("374", "-374"), AUTO, r"t\.csv:2"),
        (AZURE_ROWS.replace(",109", ""), AUTO, r"t\.csv:3"),
    ],
)
def test_a_bad_row_of_a_csv_trace_is_named(tmp_path: Path, text: str, form: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_trace(saved(tmp_path, "t.csv", text), form)


def word_tokenizer(folder: Path) -> Path:
    tokenizer = Tokenizer(WordLevel({"one": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_sharegpt_asks_the_first_turn_for_as_much_as_the_second_has(tmp_path: Path) -> None:
    talks = [{"conversations": TALK}, {"conversations": TALK[:1]}, {"conversations": [*TALK, *TALK]}]
    file = saved(tmp_path, "s.json", json.dumps(talks))
    arguments = ("--dataset-name", "sharegpt", "--dataset-path", str(file))
    made = plan(*arguments, "--tokenizer", str(word_tokenizer(tmp_path)))
    assert [(num_tokens(j.item.prompt), j.item.output_tokens, j.item.text) for j in made.jobs] == [
        (5, 4, "one two three four five")
    ] * 2
    assert made.shared == {0: 0, 1: 5}
    short = plan(*arguments, "--sharegpt-output-len", "9", "--num-prompts", "1")
    assert [j.item.output_tokens for j in short.jobs] == [9]
    assert num_tokens(short.jobs[0].item.prompt) == estimate("one two three four five") == 6


def test_sharegpt_sends_its_text_also_where_the_server_takes_ids(tmp_path: Path) -> None:
    pairs = read_sharegpt(saved(tmp_path, "s.json", json.dumps([{"conversations": TALK}])))
    item = ShareGpt(pairs=pairs, count=estimate).items(1, 0)[0]
    body = json.loads(Form(endpoint=COMPLETIONS, model="m", ids=IdRange(10, 20)).body(item))
    assert body["prompt"] == "one two three four five"


def test_sharegpt_leaves_out_what_is_too_short_or_too_long() -> None:
    def items(asked: int, answered: int) -> int:
        pairs = (("x" * 4 * asked, "y" * 4 * answered),)
        try:
            return len(ShareGpt(pairs=pairs, count=estimate).items(5, 0))
        except ConfigError:
            return 0

    lengths = ((3, 9), (9, 3), (4, 4), (1024, 1024), (1025, 9), (1000, 1049))
    assert [items(*pair) for pair in lengths] == [0, 0, 1, 1, 0, 0]


@pytest.mark.parametrize("text", ["no json", "[]", "{}", '[{"conversations": [{"from": "human"}, {}]}]', "[3]"])
def test_a_file_of_another_form_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"--dataset-path .*s\.json"):
        read_sharegpt(saved(tmp_path, "s.json", text))
    with pytest.raises(ConfigError, match="--tokenizer"):
        tokenizer_count(saved(tmp_path, "tokenizer.json", text))


def test_the_seed_decides_the_order_of_a_file() -> None:
    workload = ShareGpt(pairs=tuple((f"prompt number {i:05}", "an answer of words") for i in range(50)), count=estimate)
    first, again, other = (tuple(x.text for x in workload.items(20, seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert len(set(first)) == 20


def test_turns_grow_by_what_was_asked_and_answered() -> None:
    talks = MultiTurn(num_turns=3, first_tokens=20, next_tokens=5, output_tokens=7, prefix_tokens=8).conversations(7, 0)
    assert [len(turns) for turns in talks] == [3, 3, 1]
    for turns in talks[:2]:
        lengths = [(num_tokens(t.item.prompt), t.item.context_tokens) for t in turns]
        assert lengths == [(28, 0), (5, 35), (5, 47)]
        assert turns[0].think_s == 0
    thinks = [t.think_s for turns in MultiTurn(think_s=2).conversations(4000, 1) for t in turns[1:]]
    assert sum(thinks) / len(thinks) == pytest.approx(2, rel=0.1)
    assert max(thinks) > 6


def test_conversations_become_chains_with_indices_in_order() -> None:
    made = plan("--dataset-name", "multi_turn", "--num-prompts", "10", "--request-rate", "4", "--burstiness", "inf")
    assert [job.at_s for job in made.jobs] == [0, 1, 2]
    assert [job.index for job in every(made.jobs)] == list(range(10))
    assert [job.conversation for job in every(made.jobs)] == [0] * 4 + [1] * 4 + [2] * 2
    assert made.num_requests == 10
    assert made.output_tokens == 640
    closed = plan("--dataset-name", "multi_turn", "--num-prompts", "8", "--max-concurrency", "2")
    assert (closed.loop, len(closed.jobs)) == ("closed", 2)
    ramp = ("--ramp-up-strategy", "linear", "--ramp-up-start-rps", "1", "--ramp-up-end-rps", "2")
    with pytest.raises(ConfigError, match="--ramp-up-strategy"):
        plan("--dataset-name", "multi_turn", *ramp)


def test_a_later_turn_is_written_with_all_that_was_said() -> None:
    turn = MultiTurn(next_tokens=2).conversations(2, 0)[0][1].item
    chat = json.loads(Form(endpoint=CHAT, model="m", ids=None).body(turn, ["asked", "said"]))
    assert [m["role"] for m in chat["messages"]] == ["user", "assistant", "user"]
    assert [m["content"] for m in chat["messages"]][:2] == ["asked", "said"]
    plain = json.loads(Form(endpoint=COMPLETIONS, model="m", ids=None).body(turn, ["asked", "said"]))
    assert plain["prompt"] == f"asked said {chat['messages'][2]['content']}"


def test_some_prompts_are_long() -> None:
    lengths = [num_tokens(x.prompt) for x in RandomLengths(input_tokens=50, long_share=0.1).items(200, 3)]
    assert (lengths.count(1500), lengths.count(50)) == (20, 180)
    assert 1500 in lengths[:100]
    assert 1500 in lengths[100:]
    with pytest.raises(ConfigError, match="--random-long-share"):
        RandomLengths(long_share=1.5)


def test_tenants_come_in_turn_or_by_weight(tmp_path: Path) -> None:
    file = saved(tmp_path, "key", "secret-of-b\nrest")
    tenants = Tenants.parse(["a=k=1", f"b=@{file}"], ())
    assert tenants.keys == {"a": "k=1", "b": "secret-of-b"}
    assert tenants.of_each(5, 0) == ["a", "b", "a", "b", "a"]
    assert Tenants().of_each(2, 0) == ["", ""]
    weighted = Tenants.parse(["a=1", "b=2"], (3, 1)).of_each(4000, 7)
    assert weighted.count("a") / 4000 == pytest.approx(0.75, abs=0.03)
    assert "secret" not in repr(tenants)


@pytest.mark.parametrize(
    ("pairs", "weights"),
    [(["a"], ()), (["=k"], ()), (["a=1", "a=2"], ()), (["a=1"], (1, 2)), (["a=1"], (0,)), (["a=@/no/such"], ())],
)
def test_tenants_that_make_no_sense_are_refused_without_their_keys(
    pairs: list[str], weights: tuple[float, ...]
) -> None:
    with pytest.raises(ConfigError):
        Tenants.parse(pairs, weights)
    with pytest.raises(ConfigError) as refused:
        Tenants.parse(["a=se\ncret"], ())
    assert "cret" not in str(refused.value)


@pytest.mark.parametrize("percent", ["-1", "101", "nan"])
def test_a_cancellation_rate_is_in_percent(percent: str) -> None:
    with pytest.raises(ConfigError, match="--request-cancellation-rate"):
        plan("--request-cancellation-rate", percent)


MM = ("--dataset-name", "random-mm", "--endpoint", CHAT)


def test_pictures_come_in_the_sizes_and_numbers_asked_for() -> None:
    sizes = ("--random-mm-bucket-config", "{(48, 64, 1): 0.75, (96, 32, 1): 0.25}")
    options = (*MM, *sizes, "--random-mm-base-items-per-request", "2", "--num-prompts", "400")
    made = plan(*options, "--random-mm-num-mm-items-range-ratio", "0.5")
    counts = Counter(len(job.item.pictures) for job in made.jobs)
    assert set(counts) == {1, 2, 3}
    assert min(counts.values()) > 400 / 3 * 0.7
    drawn = Counter((picture.height, picture.width) for job in made.jobs for picture in job.item.pictures)
    assert made.num_pictures == drawn.total()
    assert drawn[48, 64] / drawn.total() == pytest.approx(0.75, abs=0.05)
    assert plan(*options).jobs == plan(*options).jobs != plan(*options, "--seed", "1").jobs


def test_a_request_with_pictures_is_text_and_data_urls_of_jpegs() -> None:
    item = plan(*MM, "--random-mm-bucket-config", "{(50, 70, 1): 1}", "--random-input-len", "3").jobs[0].item
    form = Form(endpoint=CHAT, model="m", ids=None)
    (message,) = json.loads(form.body(item))["messages"]
    words, picture = message["content"]
    assert (words["type"], len(words["text"].split())) == ("text", 3)
    head, _, data = picture["image_url"]["url"].partition(",")
    shown = Image.open(io.BytesIO(base64.b64decode(data, validate=True)))
    assert (head, shown.format, shown.size) == ("data:image/jpeg;base64", "JPEG", (70, 50))
    assert form.body(item) == form.body(item)
    assert len({jpeg(Picture(16, 16, (0, i))) for i in range(20)}) == 20


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--endpoint", COMPLETIONS), "needs --endpoint"),
        (("--random-mm-bucket-config", "{(1, 2): 1}"), "bucket-config"),
        (("--random-mm-bucket-config", "{(1, 2, 8): 1}"), "bucket-config"),
        (("--random-mm-bucket-config", "{(1, 2, 1): 0}"), "bucket-config"),
        (("--random-mm-bucket-config", "{(0, 2, 1): 1}"), "bucket-config"),
        (("--random-mm-bucket-config", "{}"), "bucket-config"),
        (("--random-mm-bucket-config", "open('x')"), "bucket-config"),
        (("--random-mm-num-mm-items-range-ratio", "2"), "range-ratio"),
    ],
)
def test_wrong_pictures_are_refused(options: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        plan(*MM, *options)


def test_sizes_are_read_as_they_are_written() -> None:
    assert parse_sizes("{(256, 256, 1): 0.5, (720, 1280, 1): 0.5}") == {(256, 256): 0.5, (720, 1280): 0.5}
