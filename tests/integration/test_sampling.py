"""Sampling fields, logprobs and structured output through real processes: apart and mixed give the same answers.

A tiny random model: what it says means nothing, but every field changes it, and it starts in seconds.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
import torch

from services.protocol.client import PdrayClient
from tests.integration.rig import Cluster

PROMPT = [5, 66, 77, 88, 300, 301, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51]
EOS = 2
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
}


@pytest.fixture(scope="module")
def cluster(tiny_cluster: Cluster) -> Cluster:
    return tiny_cluster


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(scope="module")
def model(cluster: Cluster) -> str:
    name: str = httpx.get(f"{cluster.url}/v1/models").json()["data"][0]["id"]
    return name


@pytest.fixture(scope="module")
def oracle(tiny_model_folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float32).eval()


def post(cluster: Cluster, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    body = {"prompt": PROMPT, **body} if path == "/v1/completions" else body
    return httpx.post(cluster.url + path, json=body, timeout=60)


def ids_of(cluster: Cluster, **sampling: Any) -> list[int]:
    with PdrayClient(f"127.0.0.1:{cluster.grpc_port}") as client:
        return [i for piece in client.generate(PROMPT, **sampling) for i in piece.token_ids]


def truth(oracle: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return torch.log_softmax(oracle(torch.tensor([ids])).logits[0], dim=-1)


# -- logprobs ----------------------------------------------------------------------------------------------------------


def test_logprobs_over_grpc_are_those_of_transformers(cluster: Cluster, oracle: Any) -> None:
    options = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 6, "logprobs": 3, "prompt_logprobs": 0}
    with PdrayClient(f"127.0.0.1:{cluster.grpc_port}") as client:
        pieces = list(client.generate(PROMPT, **options))
    ids = [i for piece in pieces for i in piece.token_ids]
    told = [x for piece in pieces for x in piece.logprobs]
    rows = truth(oracle, PROMPT + ids)
    assert [x.token_id for x in told] == ids
    for i, x in enumerate(told):
        row = rows[len(PROMPT) - 1 + i]
        assert abs(x.logprob - float(row[x.token_id])) < 1e-3
        assert [token_id for token_id, _ in x.top] == row.topk(3).indices.tolist()
        assert x.rank == 1
    of_prompt = pieces[0].prompt_logprobs
    assert [x.token_id for x in of_prompt] == PROMPT[1:]
    for i, x in enumerate(of_prompt):
        assert abs(x.logprob - float(rows[i][x.token_id])) < 1e-3


def test_a_chats_logprobs_join_to_its_text(client: openai.OpenAI, model: str) -> None:
    def ask(**more: Any) -> Any:
        messages: Any = [{"role": "user", "content": "Hello"}]
        return client.chat.completions.create(
            model=model, messages=messages, max_tokens=12, temperature=0, logprobs=True, **more
        )

    whole = ask(top_logprobs=4)
    choice = whole.choices[0]
    content = choice.logprobs.content
    assert b"".join(bytes(x.bytes) for x in content).decode("utf-8", "replace") == choice.message.content
    assert [len(x.top_logprobs) for x in content] == [4] * len(content)
    assert all(x.top_logprobs[0].token == x.token for x in content), "greedy, so the likeliest"
    streamed = []
    for chunk in ask(top_logprobs=4, stream=True):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content
    assert [x.token for x in streamed] == [x.token for x in content]
    assert all(abs(x.logprob - y.logprob) < 1e-3 for x, y in zip(streamed, content, strict=True))
    assert all(x.top_logprobs == [] for x in ask().choices[0].logprobs.content)


def test_a_completions_logprobs_have_offsets_into_its_text(client: openai.OpenAI, model: str) -> None:
    def ask(**more: Any) -> Any:
        return client.completions.create(
            model=model, prompt=PROMPT, max_tokens=10, temperature=0, logprobs=2, logit_bias={"300": 4}, **more
        )

    for echo in (False, True):
        choice = ask(echo=echo).choices[0]
        told = choice.logprobs
        assert told.text_offset[0] == 0
        for i, (token, offset) in enumerate(zip(told.tokens, told.text_offset, strict=True)):
            if not token.startswith("bytes:"):
                assert choice.text[offset:].startswith(token), (i, token)
        assert all(token in top for token, top in zip(told.tokens, told.top_logprobs, strict=True) if top is not None)
        assert (told.token_logprobs[0] is None) == echo
        assert len(told.tokens) == 10 + echo * len(PROMPT)
        streamed = [chunk.choices[0] for chunk in ask(echo=echo, stream=True)]
        pieces = [c.logprobs for c in streamed if c.logprobs is not None]
        assert [x for p in pieces for x in p.tokens] == told.tokens
        assert [x for p in pieces for x in p.text_offset] == told.text_offset
        assert "".join(c.text for c in streamed) == choice.text


def test_echo_alone_tells_how_likely_the_prompt_is_cold_and_warm(cluster: Cluster, oracle: Any) -> None:
    rows = truth(oracle, PROMPT)
    for turn in range(2):
        reply = post(cluster, max_tokens=0, echo=True, logprobs=1)
        assert reply.status_code == 200, reply.text
        told = reply.json()["choices"][0]["logprobs"]["token_logprobs"]
        assert told[0] is None
        assert all(abs(p - float(rows[i][PROMPT[i + 1]])) < 1e-3 for i, p in enumerate(told[1:])), turn
        assert reply.json()["usage"]["completion_tokens"] == 0
        also = post(cluster, max_tokens=1, prompt_logprobs=2).json()["choices"][0]["prompt_logprobs"]
        assert also[0] is None
        assert [x[str(t)]["logprob"] for x, t in zip(also[1:], PROMPT[1:], strict=True)] == pytest.approx(
            told[1:], abs=1e-3
        )
    assert post(cluster, max_tokens=0, echo=True).json()["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("top", [0, 20])
def test_logprobs_are_always_json(cluster: Cluster, top: int) -> None:
    """Banned tokens, a single candidate, special tokens in the list: numbers all the same."""
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 6, "logprobs": True, "top_logprobs": top}
    for more in ({"logit_bias": {"2": -100, "300": -100}}, {"temperature": 0, "top_k": 1}, {"ignore_eos": True}):
        reply = post(cluster, "/v1/chat/completions", **body, **more)
        assert reply.status_code == 200, reply.text
        for x in reply.json()["choices"][0]["logprobs"]["content"]:
            assert math.isfinite(x["logprob"])
            assert len(x["top_logprobs"]) == top


# -- what changes the draw ---------------------------------------------------------------------------------------------


def test_every_field_that_shapes_the_draw_arrives(cluster: Cluster) -> None:
    plain = ids_of(cluster, temperature=0, ignore_eos=True, max_tokens=24)
    assert ids_of(cluster, temperature=0, ignore_eos=True, max_tokens=24) == plain
    for name, value in {"presence_penalty": 2.0, "frequency_penalty": 2.0, "repetition_penalty": 2.0}.items():
        assert ids_of(cluster, temperature=0, ignore_eos=True, max_tokens=24, **{name: value}) != plain, name
    assert ids_of(cluster, temperature=0, max_tokens=3, logit_bias={300: 100}) == [300] * 3
    drawn = {"temperature": 2.0, "seed": 3, "ignore_eos": True, "max_tokens": 24}
    assert ids_of(cluster, **drawn, min_p=1.0) == plain
    assert ids_of(cluster, **drawn) != plain


def test_penalties_count_prompt_and_outputs_across_the_hand_off(cluster: Cluster, oracle: Any) -> None:
    bias, frequency, presence, repetition = {300: 12.0, 301: 11.0}, 1.5, 0.5, 1.4
    expected: list[int] = []
    for _ in range(12):
        with torch.inference_mode():
            logits = oracle(torch.tensor([PROMPT + expected])).logits[0, -1]
        row = logits.clone()
        for token_id, value in bias.items():
            row[token_id] += value
        for token_id in {*PROMPT, *expected}:
            row[token_id] = row[token_id] / repetition if row[token_id] > 0 else row[token_id] * repetition
        for token_id in set(expected):
            row[token_id] -= frequency * expected.count(token_id) + presence
        expected.append(int(row.argmax()))
    assert len(set(expected)) > 2
    penalties = {"frequency_penalty": frequency, "presence_penalty": presence, "repetition_penalty": repetition}
    options = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 12}
    assert ids_of(cluster, logit_bias=bias, **penalties, **options) == expected


def test_end_tokens_wait_for_min_tokens(cluster: Cluster) -> None:
    body = {"max_tokens": 20, "min_tokens": 12, "logit_bias": {str(EOS): 100}, "temperature": 0}
    usage = post(cluster, **body).json()["usage"]
    assert usage["completion_tokens"] == 13  # 12 others, then the end token
    assert post(cluster, **{**body, "min_tokens": 0}).json()["usage"]["completion_tokens"] == 1
    reply = post(cluster, **{**body, "min_tokens": 21})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "min_tokens")


def test_stop_texts_wait_for_min_tokens_and_are_given_back_at_the_end(cluster: Cluster) -> None:
    text = post(cluster, max_tokens=8, temperature=0, logit_bias={"300": 100}).json()["choices"][0]["text"]
    piece = text[: len(text) // 8]
    for stream in (False, True):
        held = post(
            cluster, max_tokens=8, min_tokens=5, temperature=0, logit_bias={"300": 100}, stop=piece, stream=stream
        )
        assert joined(held) == piece * 5
        never = post(cluster, max_tokens=8, temperature=0, logit_bias={"300": 100}, stop=piece * 8 + "!", stream=stream)
        assert joined(never) == text, "what was held back comes at the end"


def joined(reply: httpx.Response) -> str:
    assert reply.status_code == 200, reply.text
    if not reply.headers["content-type"].startswith("text/event-stream"):
        return str(reply.json()["choices"][0]["text"])
    events = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line.startswith("data: {")]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {"512": 1}),
        ("logit_bias", {"-1": 5}),
        ("logit_bias", {"3": 1e9}),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("repetition_penalty", 1e30),
        ("min_p", 1.5),
        ("top_k", -2),
        ("presence_penalty", 3),
        ("logprobs", 21),
        ("logprobs", -1),
        ("guided_regex", "("),
        ("guided_json", {"type": "strin"}),
        ("guided_grammar", "root ::= "),
        ("response_format", {"type": "xml"}),
    ],
)
def test_an_impossible_value_is_a_400_and_harms_no_neighbour(cluster: Cluster, field: str, value: Any) -> None:
    with ThreadPoolExecutor(2) as pool:
        healthy = pool.submit(ids_of, cluster, temperature=0, ignore_eos=True, max_tokens=12)
        for stream in (False, True):
            reply = post(cluster, max_tokens=4, stream=stream, **{field: value})
            assert reply.status_code == 400, reply.text
            assert reply.headers["content-type"].startswith("application/json")
            assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
        assert healthy.result() == ids_of(cluster, temperature=0, ignore_eos=True, max_tokens=12)


@pytest.mark.parametrize("body", [{"top_k": k} for k in (-1, 0, 511, 512, 513, 2**31)] + [{"repetition_penalty": 1e-9}])
def test_an_edge_value_works(cluster: Cluster, body: dict[str, Any]) -> None:
    reply = post(cluster, max_tokens=3, temperature=1.0, seed=1, **body)
    assert reply.status_code == 200, reply.text


# -- structured output -------------------------------------------------------------------------------------------------


def test_a_json_schema_by_the_openai_client(client: openai.OpenAI, model: str) -> None:
    messages: Any = [{"role": "user", "content": "Who are you?"}]
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
    for seed in range(3):
        answer = client.chat.completions.create(
            model=model, messages=messages, response_format=wanted, max_tokens=200, seed=seed, n=2
        )
        for choice in answer.choices:
            assert choice.finish_reason == "stop"
            jsonschema.validate(json.loads(choice.message.content or ""), PERSON)


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"structured_outputs": {"regex": "[0-9]{3}-[a-z]{2}"}}, "[0-9]{3}-[a-z]{2}"),
        ({"structured_outputs": {"choice": ["red", "green"]}}, "red|green"),
        ({"guided_choice": ["red", "green"]}, "red|green"),
        ({"guided_grammar": 'root ::= "(" root ")" | "x"'}, r"\(*x\)*"),
        ({"guided_grammar": 'start: "<" /[a-z]{4}/ ">"'}, "<[a-z]{4}>"),
    ],
)
def test_other_structures_streamed_and_whole(
    client: openai.OpenAI, model: str, extra: dict[str, Any], pattern: str
) -> None:
    fields: Any = {"model": model, "prompt": PROMPT, "max_tokens": 60, "seed": 5, "extra_body": extra}
    whole = client.completions.create(**fields).choices[0]
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**fields, stream=True))
    assert streamed == whole.text
    if whole.finish_reason == "stop":
        assert re.fullmatch(pattern, whole.text), whole.text


def test_structure_over_grpc(cluster: Cluster) -> None:
    with PdrayClient(f"127.0.0.1:{cluster.grpc_port}") as client:
        for asked in ({"json": json.dumps(PERSON)}, {"json_object": True}):
            pieces = list(client.generate(PROMPT, max_tokens=300, temperature=0, **asked))
            if pieces[-1].finish_reason == "stop":
                assert isinstance(json.loads("".join(piece.text for piece in pieces)), dict)
