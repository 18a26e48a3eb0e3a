"""What clients really send, and what other servers made of it: each table entry is a good answer or a plain 400."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest

from tests.integration.rig import Cluster

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
PROMPT = [5, 66, 77, 88, 300]
ENDS_AT_ONCE = {"logit_bias": {"2": 100}, "temperature": 0}
"""The end token is the first: an answer that may be long is short."""
SENTENCE = "The quick brown fox jumps over the lazy dog, and then it rests."
SCRIPTS = "한국어 नमस्ते दुनिया 👨‍👩‍👧‍👦 家族 and ASCII"


@pytest.fixture(scope="module")
def cluster(tiny_cluster: Cluster) -> Cluster:
    return tiny_cluster


@pytest.fixture(scope="module")
def context(cluster: Cluster) -> int:
    return int(httpx.get(f"{cluster.url}/v1/models").json()["data"][0]["max_model_len"])


def post(cluster: Cluster, path: str, **body: Any) -> httpx.Response:
    return httpx.post(cluster.url + path, json=body, timeout=60)


def text_of(reply: httpx.Response) -> str:
    """Of a completion, streamed or not."""
    assert reply.status_code == 200, reply.text
    return "".join(choice["text"] for choice in choices_of(reply))


def choices_of(reply: httpx.Response) -> list[dict[str, Any]]:
    if not reply.headers["content-type"].startswith("text/event-stream"):
        return list(reply.json()["choices"])
    events = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line.startswith("data: {")]
    return [choice for event in events for choice in json.loads(event)["choices"]]


def check_refusal(reply: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert reply.status_code == status, reply.text[:300]
    assert reply.headers["content-type"].startswith("application/json")
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


def saying(text: str) -> dict[str, Any]:
    """Fields that make any model say exactly this."""
    return {"prompt": PROMPT, "max_tokens": 400, "temperature": 0, "structured_outputs": {"choice": [text]}}


@pytest.mark.parametrize("first", [0, 1])
def test_prompt_logprobs_do_not_depend_on_the_cache(cluster: Cluster, first: int) -> None:
    """A prompt twice, and one that shares three blocks with it, in both orders."""
    long = [(7 * i + first) % 500 + 5 for i in range(80)]
    cousin = long[:48] + [9] * 32
    order = [long, cousin, long] if first else [cousin, long, cousin]
    ask = partial(post, cluster, TEXT, echo=True, logprobs=2, max_tokens=1, temperature=0)
    salts = {"cache_salt": f"prompt-logprobs-{first}"}
    warm = [ask(prompt=prompt, **salts).json()["choices"][0]["logprobs"] for prompt in order]
    cold = [ask(prompt=prompt, cache_salt=f"cold-{first}-{i}").json()["choices"][0] for i, prompt in enumerate(order)]
    for one, other in zip(warm, (x["logprobs"] for x in cold), strict=True):
        assert one["tokens"] == other["tokens"]
        assert len(one["token_logprobs"]) == 81
        assert one["token_logprobs"][1:] == pytest.approx(other["token_logprobs"][1:], abs=1e-3)


@pytest.mark.parametrize(
    ("value", "status"),
    [(None, 200), (0, 400), (-1, 400), (1, 200), (1.5, 400), ("5", 400), (True, 400), (10**12, 400)],
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_max_tokens(cluster: Cluster, path: str, value: Any, status: int) -> None:
    body = {"messages": HELLO} if path == CHAT else {"prompt": PROMPT}
    reply = post(cluster, path, max_tokens=value, **body, **ENDS_AT_ONCE)
    if status == 200:
        assert reply.status_code == 200, reply.text
    else:
        assert check_refusal(reply)["param"] == "max_tokens"


def test_max_tokens_up_to_the_context(cluster: Cluster, context: int) -> None:
    assert post(cluster, TEXT, prompt=PROMPT, max_tokens=0, echo=True).status_code == 200
    room = context - len(PROMPT)
    assert post(cluster, TEXT, prompt=PROMPT, max_tokens=room, **ENDS_AT_ONCE).status_code == 200
    error = check_refusal(post(cluster, TEXT, prompt=PROMPT, max_tokens=room + 1))
    assert str(context) in error["message"]


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["ok", ""], " ", [5, -1], [5, 10**9]])
def test_an_empty_or_impossible_prompt_ends_nothing(cluster: Cluster, prompt: Any) -> None:
    reply = post(cluster, TEXT, prompt=prompt, max_tokens=2)
    assert reply.status_code == 200 if prompt == " " else reply.status_code in (200, 400), reply.text
    if reply.status_code == 400:
        check_refusal(reply)
    assert post(cluster, TEXT, prompt=PROMPT, max_tokens=2).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_too_long_is_told_both_numbers(cluster: Cluster, context: int, stream: bool) -> None:
    for length, more in ((context + 1, {}), (context, {}), (context - 3, {"max_tokens": 4}), (10 * context, {})):
        error = check_refusal(post(cluster, TEXT, prompt=[7] * length, stream=stream, **more))
        assert error["code"] == "context_length_exceeded"
        assert str(context) in error["message"]
        assert str(length) in error["message"]
    assert httpx.get(f"{cluster.url}/health").status_code == 200


def test_a_stop_text_over_token_borders(cluster: Cluster) -> None:
    assert text_of(post(cluster, TEXT, **saying(SENTENCE))) == SENTENCE
    slices = sorted({SENTENCE[i : i + n] for i in range(0, len(SENTENCE) - 4, 7) for n in (2, 3, 4)})

    def ask(stop: str, stream: bool) -> httpx.Response:
        return post(cluster, TEXT, **saying(SENTENCE), stop=stop, stream=stream)

    with ThreadPoolExecutor(8) as pool:
        for is_stream in (False, True):
            for stop, reply in zip(slices, pool.map(partial(ask, stream=is_stream), slices), strict=True):
                assert text_of(reply) == SENTENCE[: SENTENCE.index(stop)], (stop, is_stream)
                assert choices_of(reply)[-1]["finish_reason"] == "stop"


def test_characters_of_many_bytes_come_whole(cluster: Cluster) -> None:
    assert text_of(post(cluster, TEXT, **saying(SCRIPTS))) == SCRIPTS
    streamed = post(cluster, TEXT, **saying(SCRIPTS), stream=True)
    assert text_of(streamed) == SCRIPTS
    assert all("\ufffd" not in choice["text"] for choice in choices_of(streamed))
    told = post(cluster, CHAT, messages=HELLO, max_tokens=400, logprobs=True, guided_choice=[SCRIPTS])
    content = told.json()["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(x["bytes"]) for x in content).decode() == SCRIPTS


def test_temperatures_at_the_edges(cluster: Cluster) -> None:
    def ask(temperature: str) -> httpx.Response:
        data = f'{{"prompt": {PROMPT}, "max_tokens": 8, "ignore_eos": true, "temperature": {temperature}}}'
        return httpx.post(cluster.url + TEXT, content=data, headers={"Content-Type": "application/json"}, timeout=60)

    greedy = text_of(ask("0"))
    for tiny in ("1e-9", "5e-6", "1e-300"):
        assert text_of(ask(tiny)) == greedy, tiny
    for good in ("2", "null", "1.0"):
        assert ask(good).status_code == 200
    for bad in ("2.01", "-0.1", "NaN", "Infinity", "1e400", '"NaN"', "true", "[0]"):
        check_refusal(ask(bad))
    assert text_of(ask("0")) == greedy


def test_forms_of_stop(cluster: Cluster) -> None:
    ask = partial(post, cluster, TEXT, **saying(SENTENCE))
    for nothing in (None, []):
        assert text_of(ask(stop=nothing)) == SENTENCE
    for fox in ("fox", ["fox"], ["fox", "fox"], ["dog", "fox", "zzz", "yyy", "xxx"]):
        assert text_of(ask(stop=fox)) == "The quick brown ", fox
    for bad in ("", ["", "x"], [1], 7, {"a": 1}, "x" * 10_000, ["x"] * 17):
        assert check_refusal(ask(stop=bad))["param"] == "stop"


def test_one_label_on_many_requests_is_only_a_label(cluster: Cluster) -> None:
    texts = [f"{SENTENCE} Number {i}." for i in range(10)]

    def ask(text: str) -> httpx.Response:
        return httpx.post(cluster.url + TEXT, json=saying(text), headers={"X-Request-Id": "the-same"}, timeout=60)

    def leave(_: int) -> None:
        body = {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True, "stream": True}
        with httpx.stream(
            "POST", cluster.url + TEXT, json=body, headers={"X-Request-Id": "the-same"}, timeout=60
        ) as reply:
            next(reply.iter_bytes())

    with ThreadPoolExecutor(12) as pool:
        leaving = [pool.submit(leave, i) for i in range(2)]
        assert [text_of(reply) for reply in pool.map(ask, texts)] == texts
        for done in leaving:
            done.result()
