"""Bad requests against real workers: an OpenAI-shaped 4xx before any stream byte, and the next request works."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.integration.rig import Cluster

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
JSON = {"Content-Type": "application/json"}


def image(url: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]


BODIES: dict[str, tuple[str, Any, int]] = {
    "unknown model": (TEXT, {"model": "no-such", "prompt": "a"}, 404),
    "model in other case": (TEXT, {"model": "smollm2-135m-instruct", "prompt": "a"}, 404),
    "model of a wrong type": (TEXT, {"model": 7, "prompt": "a"}, 400),
    "empty prompt list": (TEXT, {"prompt": []}, 400),
    "no prompt": (TEXT, {}, 400),
    "id below zero": (TEXT, {"prompt": [5, -1]}, 400),
    "id past the vocabulary": (TEXT, {"prompt": [5, 10**9]}, 400),
    "max_tokens 0": (TEXT, {"prompt": "a", "max_tokens": 0}, 400),
    "max_tokens -1": (TEXT, {"prompt": "a", "max_tokens": -1}, 400),
    "max_tokens 1.5": (CHAT, {"messages": HELLO, "max_tokens": 1.5}, 400),
    "max_tokens as text": (CHAT, {"messages": HELLO, "max_tokens": "5"}, 400),
    "max_tokens true": (CHAT, {"messages": HELLO, "max_tokens": True}, 400),
    "max_tokens past the context": (CHAT, {"messages": HELLO, "max_tokens": 10**12}, 400),
    "both limits": (CHAT, {"messages": HELLO, "max_tokens": 5, "max_completion_tokens": 6}, 400),
    "a prompt over the context": (TEXT, {"prompt": [5] * 9000}, 400),
    "a prompt that fills the context": (TEXT, {"prompt": [5] * 8192}, 400),
    "an answer that never fits the KV": (TEXT, {"prompt": [5] * 100, "max_tokens": 8000}, 400),
    "no messages": (CHAT, {"messages": []}, 400),
    "an unknown role": (CHAT, {"messages": [{"role": "wizard", "content": "a"}]}, 400),
    "an image": (CHAT, {"messages": image("data:image/png;base64,AAAA")}, 400),
    "n of 0": (CHAT, {"messages": HELLO, "n": 0}, 400),
    "n past the limit": (CHAT, {"messages": HELLO, "n": 17}, 400),
    "best_of above n": (TEXT, {"prompt": "a", "n": 2, "best_of": 3}, 400),
    "temperature -1": (CHAT, {"messages": HELLO, "temperature": -0.1}, 400),
    "empty stop": (CHAT, {"messages": HELLO, "stop": ""}, 400),
    "half a character": (CHAT, {"messages": [{"role": "user", "content": "\ud83d"}]}, 400),
}
RAW: dict[str, tuple[bytes, int]] = {
    "not JSON": (b"{", 400),
    "a list": (b"[]", 400),
    "null": (b"null", 400),
    "invalid UTF-8": (b'{"prompt": "\xff"}', 400),
    "deep nesting": (b'{"prompt": ' + b"[" * 1000 + b"]" * 1000 + b"}", 400),
    "NaN": (b'{"prompt": "a", "temperature": NaN}', 400),
    "a number past every float": (b'{"prompt": "a", "temperature": 1e400}', 400),
    "too large": (b'{"prompt": "' + b"a" * (9 << 20) + b'"}', 413),
}


def check(reply: httpx.Response, status: int) -> None:
    assert reply.status_code == status, reply.text[:500]
    assert reply.headers["content-type"].startswith("application/json")
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    assert isinstance(reply.json()["error"]["message"], str)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", BODIES)
def test_a_bad_request_is_refused_before_any_stream_byte(pd_cluster: Cluster, name: str, stream: bool) -> None:
    path, body, status = BODIES[name]
    data = json.dumps({**body, "stream": stream}).encode()
    reply = httpx.post(pd_cluster.url + path, content=data, headers=JSON, timeout=30)
    check(reply, status)


@pytest.mark.parametrize("name", RAW)
def test_a_body_that_is_no_request_is_refused(pd_cluster: Cluster, name: str) -> None:
    data, status = RAW[name]
    check(httpx.post(pd_cluster.url + TEXT, content=data, headers=JSON, timeout=30), status)


def test_an_image_part_is_told_what_is_not_there_yet(pd_cluster: Cluster) -> None:
    reply = httpx.post(pd_cluster.url + CHAT, json={"messages": image("https://example.invalid/a.png")}, timeout=30)
    assert reply.status_code == 400
    assert "image" in reply.json()["error"]["message"].lower()
    assert reply.json()["error"]["code"] == "not_yet_supported"


def test_the_next_request_works(pd_cluster: Cluster) -> None:
    reply = pd_cluster.complete([5, 6, 7])
    assert reply.status_code == 200
    assert reply.json()["usage"]["completion_tokens"] == 4
