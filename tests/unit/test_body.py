"""Request bodies: strict JSON, or a 400 that says what is wrong and where."""

from __future__ import annotations

import pytest

from services.protocol.errors import RequestError
from services.router.body import MAX_DEPTH, parse_object


def refusal(raw: bytes) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse_object(raw)
    return caught.value


def nested(depth: int) -> bytes:
    return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


@pytest.mark.parametrize(
    "raw",
    [
        *(b"", b"[]", b"null", b"1", b'"x"', b"{", b"{'a':1}", b'{"a":1}{', b'{"a":"\x01"}'),
        *(b"\xff\xfe{}", b'{"a":"\xc3"}', b'\xef\xbb\xbf{"a":1}'),
        *(b'{"a":NaN}', b'{"a":-Infinity}', b'{"a":' + b"9" * 5000 + b"}"),
        *(b'{"a":1,"a":2}', b'{"x":{"b":1,"b":1}}'),
        *(nested(MAX_DEPTH + 1), nested(1000), nested(200_000)),
    ],
)
def test_a_body_that_is_no_strict_json_object_is_refused(raw: bytes) -> None:
    assert refusal(raw).status.http == 400


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (rb'{"messages":[{"role":"user","content":"\ud83d"}]}', "messages[0].content"),
        (rb'{"stop":["\uDE00 x"]}', "stop[0]"),
        (rb'{"model":"\ud83d"}', "model"),
        (rb'{"metadata":{"k":"\ud83d"}}', "metadata.k"),
        (rb'{"metadata":{"\ud83d":"v"}}', "metadata.?"),
    ],
)
def test_half_of_a_surrogate_pair_is_refused_with_its_place(raw: bytes, param: str) -> None:
    error = refusal(raw)
    assert (error.status.http, error.param) == (400, param)


def test_whole_pairs_nul_and_an_overflowing_number_pass_the_parser() -> None:
    assert parse_object(rb'{"a":"\ud83d\ude00\u0000","b":1e400}') == {"a": "😀\0", "b": float("inf")}
    assert parse_object(nested(MAX_DEPTH))
