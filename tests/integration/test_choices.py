"""Several choices of one prompt through real processes: the same tokens with prefill and decode apart, mixed, in a pool
that is too small for all, and in one process; each choice with its own index, text and end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from services.engine.loader import load_model
from services.engine.messages import Sampling
from services.protocol.client import PdrayClient
from tests.engine_harness import Harness, sequence
from tests.integration.rig import Cluster

N = 4
NUM_TOKENS = 24
SEED = 5
LENGTHS = (1, 15, 16, 17, 200)
HI: Any = [{"role": "user", "content": "abc the def"}]

SHAPES: dict[str, dict[str, Any]] = {
    "tight-tcp": {"settings": {"transfer.transport": "tcp", "engine.num_blocks": 17}},
    "mixed": {"prefill": 0, "decode": 0, "mixed": 1},
    "tcp": {"settings": {"transfer.transport": "tcp", "engine.max_num_batched_tokens": 64}},
    "mooncake": {"settings": {"transfer.transport": "mooncake"}},
}
QUICK = ("tight-tcp", "mixed")


@pytest.fixture(
    scope="module", params=[name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SHAPES]
)
def cluster(
    request: pytest.FixtureRequest, tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp(request.param), tiny_model_folder, **SHAPES[request.param])
    asyncio.run(made.start())
    try:
        yield made
    finally:
        asyncio.run(made.stop())


@pytest.fixture(scope="module")
def sdk(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def prompt(length: int) -> list[int]:
    source = random.Random(length)
    return [source.randrange(3, 512) for _ in range(length)]


@pytest.fixture(scope="module")
def expected(tiny_model_folder: Path) -> dict[int, dict[int, list[int]]]:
    """Choice → ids, by prompt length, from an engine in this process."""
    model = load_model(tiny_model_folder, dtype="float32")
    sampling = Sampling(temperature=1.0, seed=SEED, max_tokens=NUM_TOKENS, ignore_eos=True)
    found = {}
    for length in LENGTHS:
        harness = Harness(model)
        harness.send(sequence("a", prompt(length), sampling=sampling, n=N))
        harness.run()
        outputs = harness.outputs()
        found[length] = {i: [t for o in outputs if o.choice == i for t in o.token_ids] for i in range(N)}
    return found


def generate(cluster: Cluster, length: int) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    with PdrayClient(f"127.0.0.1:{cluster.grpc_port}") as client:
        for piece in client.generate(
            prompt(length), n=N, seed=SEED, temperature=1.0, max_tokens=NUM_TOKENS, ignore_eos=True
        ):
            found.setdefault(piece.choice, []).extend(piece.token_ids)
    return found


def counters(cluster: Cluster, *names: str) -> dict[str, int]:
    rows = asyncio.run(cluster.idle())
    return {name: sum(w[name] for w in rows) for name in names}


def test_seeded_choices_are_the_same_everywhere(cluster: Cluster, expected: dict[int, dict[int, list[int]]]) -> None:
    for length in LENGTHS:
        assert generate(cluster, length) == expected[length], f"prompt of {length} tokens, seed {SEED}"


def test_and_among_others(cluster: Cluster, expected: dict[int, dict[int, list[int]]]) -> None:
    wanted = [*LENGTHS, *LENGTHS]
    with ThreadPoolExecutor(len(wanted)) as pool:
        got = list(pool.map(lambda length: generate(cluster, length), wanted))
    assert [expected[length] for length in wanted] == got
    if "engine.num_blocks" in cluster.settings:
        assert counters(cluster, "tokens_recomputed")["tokens_recomputed"]


def test_the_prompt_is_computed_and_moved_once(cluster: Cluster) -> None:
    names = ("prompt_tokens_computed", "decode_tokens_forwarded", "tokens_recomputed")
    before = counters(cluster, *names)
    ids = [random.Random(99).randrange(3, 512) for _ in range(100)]
    body = {"n": N, "temperature": 1.0, "max_tokens": 10, "cache_salt": "once"}
    reply = cluster.complete(ids, **body)
    assert reply.json()["usage"]["completion_tokens"] == N * 10, reply.text
    after = counters(cluster, *names)
    assert after["prompt_tokens_computed"] - before["prompt_tokens_computed"] == 100
    assert after["decode_tokens_forwarded"] - before["decode_tokens_forwarded"] == N * 9
    if not cluster.mixed:
        debug = asyncio.run(cluster.debug(reply.headers["x-request-id"]))
        assert debug["bytes_moved"] == 7 * 16 * 2 * 2 * 2 * 8 * 4  # 7 blocks, 2 layers, K and V, 2 heads of 8, fp32
        assert debug["output_tokens"] == N * 10


def test_choices_over_http(cluster: Cluster, sdk: openai.OpenAI) -> None:
    options: Any = {"model": "", "n": 3, "max_tokens": 12, "temperature": 1.0, "seed": 3}
    options["model"] = sdk.models.list().data[0].id
    chat = sdk.chat.completions.create(messages=HI, **options)
    text = sdk.completions.create(prompt=["ab", "cd"], **options)
    assert [c.index for c in chat.choices] == [0, 1, 2]
    assert [c.index for c in text.choices] == list(range(6))
    assert {c.finish_reason for c in (*chat.choices, *text.choices)} <= {"stop", "length"}
    assert len({c.message.content for c in chat.choices}) == 3
    assert chat.usage is not None
    assert chat.usage.total_tokens == chat.usage.prompt_tokens + chat.usage.completion_tokens

    parts = dict.fromkeys(range(3), "")
    usage = None
    usage_too: Any = {"stream": True, "stream_options": {"include_usage": True}}
    for chunk in sdk.chat.completions.create(messages=HI, **options, **usage_too):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            parts[choice.index] += choice.delta.content or ""
    assert parts == {c.index: c.message.content for c in chat.choices}
    assert usage is not None
    assert usage.completion_tokens == chat.usage.completion_tokens
    assert usage.prompt_tokens == chat.usage.prompt_tokens

    texts = dict.fromkeys(range(6), "")
    for piece in sdk.completions.create(prompt=["ab", "cd"], **options, stream=True):
        for answer in piece.choices:
            texts[answer.index] += answer.text
    assert texts == {c.index: c.text for c in text.choices}


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_one_choice(cluster: Cluster, sdk: openai.OpenAI, stream: bool) -> None:
    options: Any = {"model": sdk.models.list().data[0].id, "prompt": "the abc", "n": 3, "seed": 3, "temperature": 1.0}
    options |= {"max_tokens": 40, "extra_body": {"ignore_eos": True}}
    whole = {c.index: c.text for c in sdk.completions.create(**options).choices}
    for choice in range(3):
        stop = next(
            whole[choice][i : i + 3]
            for i in range(2, len(whole[choice]))
            if not any(whole[choice][i : i + 3] in whole[o] for o in whole if o != choice)
        )
        cut = {i: t.split(stop)[0] for i, t in whole.items()}
        if stream:
            texts, reasons = dict.fromkeys(range(3), ""), dict.fromkeys(range(3), "")
            for chunk in sdk.completions.create(**options, stop=[stop], stream=True):
                for c in chunk.choices:
                    texts[c.index] += c.text
                    reasons[c.index] = c.finish_reason or reasons[c.index]
        else:
            answer = sdk.completions.create(**options, stop=[stop])
            texts = {c.index: c.text for c in answer.choices}
            reasons = {c.index: c.finish_reason for c in answer.choices}
        assert texts == cut, (choice, stop)
        assert reasons == {i: "stop" if i == choice else "length" for i in range(3)}
    asyncio.run(cluster.idle())


@pytest.mark.parametrize("stream", [False, True])
def test_many_requests_for_choices_at_once_all_end(cluster: Cluster, stream: bool) -> None:
    def ask(seed: int) -> set[int]:
        body = {"messages": HI, "n": 4, "temperature": 1.0, "max_tokens": 12, "stream": stream, "seed": seed}
        reply = httpx.post(f"{cluster.url}/v1/chat/completions", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        if not stream:
            return {c["index"] for c in reply.json()["choices"] if c["finish_reason"] in ("stop", "length")}
        events = [line for line in reply.text.splitlines() if line.startswith("data: {")]
        ends = [e for e in events if '"finish_reason":"' in e]
        return {i for i in range(4) if any(f'"index":{i}' in e for e in ends)}

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, range(6))) == [{0, 1, 2, 3}] * 6


def test_a_client_that_leaves_frees_all_choices(cluster: Cluster) -> None:
    with PdrayClient(f"127.0.0.1:{cluster.grpc_port}") as client:
        stream = client.generate(prompt(17), n=N, temperature=1.0, max_tokens=200, ignore_eos=True)
        for _ in range(8):
            next(stream)
        stream.close()  # type: ignore[attr-defined]
    asyncio.run(cluster.idle())


def test_a_single_token_for_each_choice_needs_no_decode_worker(
    cluster: Cluster, expected: dict[int, dict[int, list[int]]]
) -> None:
    before = counters(cluster, "decode_tokens_forwarded")
    with PdrayClient(f"127.0.0.1:{cluster.grpc_port}") as client:
        options: Any = {"n": N, "seed": SEED, "temperature": 1.0, "max_tokens": 1, "ignore_eos": True}
        pieces = list(client.generate(prompt(17), **options))
    first = {p.choice: list(p.token_ids) for p in pieces if p.token_ids}
    assert first == {i: tokens[:1] for i, tokens in expected[17].items()}
    assert counters(cluster, "decode_tokens_forwarded") == before


def test_choices_that_end_with_token_1_do_not_stop_the_others(
    cluster: Cluster, expected: dict[int, dict[int, list[int]]]
) -> None:
    first = expected[200][0][0]
    over = {i for i, tokens in expected[200].items() if tokens[0] == first}
    assert over != set(range(N)), f"seed {SEED} is of no use here"
    with PdrayClient(f"127.0.0.1:{cluster.grpc_port}") as client:
        options: Any = {"n": N, "seed": SEED, "temperature": 1.0, "max_tokens": 5, "ignore_eos": True}
        pieces = list(client.generate(prompt(200), stop_token_ids=[first], **options))
    found = {i: [t for p in pieces if p.choice == i for t in p.token_ids] for i in range(N)}
    for i, tokens in found.items():
        assert tokens == expected[200][i][: len(tokens)]
        assert (len(tokens) == 1) == (i in over)
