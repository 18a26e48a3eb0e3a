"""Fields that shape the answer: limits, meanings, and errors that name the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.protocol.errors import ErrorCode, RequestError
from services.protocol.grammar import ANY_OBJECT, GrammarSpec, check
from services.router.types import Shaping
from services.router.validate import chat_ask, completion_ask

VOCAB = 500
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def shaping(is_chat: bool = False, **body: Any) -> Shaping:
    if is_chat:
        return chat_ask({"messages": [{"role": "user", "content": "a"}], **body}, "m", VOCAB).shaping
    return completion_ask({"prompt": "a", **body}, "m", VOCAB).shaping


def refused(is_chat: bool = False, **body: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        shaping(is_chat, **body)
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    return caught.value


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("min_p", [0, 0.5, 1], [-0.1, 1.01, "a", True]),
        ("presence_penalty", [-2, 0, 2], [-2.01, 2.01, "1"]),
        ("frequency_penalty", [-2, 0, 2], [-2.01, 2.01, [1]]),
        ("repetition_penalty", [1e-9, 1, 2], [0, -1, 2.01, 1e30]),
        ("prompt_logprobs", [0, 5, 20], [-1, 21, 1.5]),
        ("logprobs", [0, 5, 20], [-1, 21, "5", True]),
    ],
)
def test_numbers_have_limits(field: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        assert getattr(shaping(**{field: value}), field) == value
    for value in bad:
        assert refused(**{field: value}).param == field, value


def test_absent_and_null_ask_for_nothing() -> None:
    wishes = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "logit_bias")
    numbers = ("min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs", "prompt_logprobs")
    nothing = dict.fromkeys((*wishes, *numbers))
    assert shaping() == shaping(**nothing) == Shaping()
    assert shaping(is_chat=True, top_logprobs=None, logprobs=False) == Shaping()
    assert shaping(response_format={"type": "text"}) == Shaping()


def test_biases_are_by_token_id() -> None:
    assert shaping(logit_bias={"3": 5, "0": -100}).logit_bias == ((0, -100.0), (3, 5.0))
    assert shaping(logit_bias={"499": 100}).logit_bias == ((499, 100.0),)
    for bad in ({"500": 1}, {"-1": 5}, {"3": 1e9}, {"3": -100.5}, {"a": 1}, {"1.0": 1}, {"": 1}, {"3": "1"}, [3]):
        assert str(refused(logit_bias=bad).param).startswith("logit_bias"), bad
    assert refused(logit_bias={str(i): 1 for i in range(1025)}).param == "logit_bias"


def test_logprobs_of_a_chat_are_a_flag_and_a_number() -> None:
    assert shaping(is_chat=True, logprobs=True).logprobs == 0
    assert shaping(is_chat=True, logprobs=True, top_logprobs=20).logprobs == 20
    assert refused(is_chat=True, top_logprobs=5).param == "top_logprobs"
    assert refused(is_chat=True, logprobs=True, top_logprobs=21).param == "top_logprobs"
    assert refused(is_chat=True, logprobs=True, top_logprobs=-1).param == "top_logprobs"
    assert refused(is_chat=True, logprobs=5).param == "logprobs"


def test_logprobs_of_a_prompt() -> None:
    assert shaping(echo=True, logprobs=3).prompt_tops == 3
    assert shaping(echo=True, logprobs=3, prompt_logprobs=5).prompt_tops == 5
    assert shaping(echo=True).prompt_tops is None
    assert shaping(logprobs=3).prompt_tops is None
    assert refused(prompt_logprobs=1, stream=True).param == "prompt_logprobs"


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", ANY_OBJECT),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
                }
            },
            "json_schema",
            json.dumps(SCHEMA),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", json.dumps(SCHEMA)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", json.dumps(SCHEMA)),
        ({"structured_outputs": {"json_object": True}}, "json_schema", ANY_OBJECT),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["é", "b", "b"]}}, "choice", '["é", "b"]'),
        ({"structured_outputs": {"grammar": "start: /a/"}}, "grammar", "start: /a/"),
        ({"guided_json": SCHEMA}, "json_schema", json.dumps(SCHEMA)),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a"]}, "choice", '["a"]'),
        ({"guided_grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
    ],
)
def test_every_way_to_ask_for_structure(body: dict[str, Any], kind: str, text: str) -> None:
    spec = shaping(**body).grammar
    assert spec == GrammarSpec(kind=kind, text=text)
    check(spec)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": [1]}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ],
)
def test_a_malformed_wish_for_structure_names_its_field(body: dict[str, Any], param: str) -> None:
    assert refused(**body).param == param
