"""Each field of a request, value by value: what is taken, and what is refused under which name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.protocol.errors import ErrorCode, RequestError
from services.router.features import KNOWN_WITHOUT_EFFECT, NOT_THERE
from services.router.validate import (
    INT64_MAX,
    MAX_PROMPTS,
    MAX_STOP_CHARS,
    MAX_STOPS,
    Ask,
    chat_ask,
    completion_ask,
)

VOCAB = 500
MODEL = "tiny"
USER = [{"role": "user", "content": "hi"}]
BIG = 10**12


def chat(**fields: Any) -> Ask:
    return chat_ask({"messages": USER, **fields}, MODEL, VOCAB)


def completion(**fields: Any) -> Ask:
    return completion_ask({"prompt": "hi", **fields}, MODEL, VOCAB)


def refusal(make: Any, *args: Any, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        make(*args, **fields)
    json.dumps(caught.value.body(), allow_nan=False).encode()  # always a valid document
    return caught.value


@pytest.mark.parametrize("make", [chat, completion])
class TestLimits:
    @pytest.mark.parametrize(("value", "limit"), [(None, 56), (1, 1), (5.0, 5), (56, 56)])
    def test_max_tokens_is_what_was_asked_or_what_the_context_leaves(self, make: Any, value: Any, limit: int) -> None:
        assert make(max_tokens=value).sampling(200, 256).max_tokens == limit

    @pytest.mark.parametrize("value", [0, -1, 1.5, "5", True, [], 2**70])
    def test_a_max_tokens_that_is_no_count_is_refused(self, make: Any, value: Any) -> None:
        error = refusal(make, max_tokens=value)
        assert (error.status.http, error.param) == (400, "max_tokens")

    @pytest.mark.parametrize("value", [57, BIG])
    def test_a_max_tokens_past_the_context_names_what_was_sent(self, make: Any, value: int) -> None:
        error = refusal(make(max_completion_tokens=value).sampling, 200, 256)
        assert error.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
        assert error.param == "max_completion_tokens"
        for number in ("200", str(value), "256"):
            assert number in error.message
        assert "-" not in error.message.replace("max_completion_tokens", "")

    def test_a_prompt_that_fills_the_context_has_no_room_for_an_answer(self, make: Any) -> None:
        error = refusal(make().sampling, 256, 256)
        assert error.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
        assert "256" in error.message
        assert make().sampling(255, 256).max_tokens == 1

    def test_both_limits_must_agree(self, make: Any) -> None:
        assert make(max_tokens=4, max_completion_tokens=4).max_tokens == 4
        assert refusal(make, max_tokens=4, max_completion_tokens=5).param == "max_completion_tokens"

    def test_min_tokens_may_not_pass_the_limit(self, make: Any) -> None:
        assert make(min_tokens=12, max_tokens=12).min_tokens == 12
        assert refusal(make, min_tokens=13, max_tokens=12).param == "min_tokens"
        assert refusal(make(min_tokens=57).sampling, 200, 256).param == "min_tokens"
        assert refusal(make, min_tokens=-1).param == "min_tokens"


def test_max_tokens_0_only_goes_with_echo() -> None:
    assert completion(max_tokens=0, echo=True).sampling(256, 256).max_tokens == 0
    assert refusal(completion, max_tokens=0, echo=False).param == "max_tokens"
    assert chat(echo=True).ignored == ("echo",)


@pytest.mark.parametrize(("value", "taken"), [(None, 1.0), (0, 0.0), (1e-9, 1e-9), (5e-6, 5e-6), (2, 2.0), (0.7, 0.7)])
def test_a_temperature_from_0_to_2_is_taken(value: Any, taken: float) -> None:
    assert chat(temperature=value).temperature == taken


@pytest.mark.parametrize("value", [2.01, -0.1, float("nan"), float("inf"), "NaN", "1", True, [1], 10**30])
def test_another_temperature_is_refused(value: Any) -> None:
    error = refusal(chat, temperature=value)
    assert (error.status.http, error.param) == (400, "temperature")


@pytest.mark.parametrize(("value", "taken"), [(None, 0), (0, 0), (-1, 0), (1, 1), (499, 499), (500, 0), (2**31, 0)])
def test_top_k_past_the_vocabulary_is_off(value: Any, taken: int) -> None:
    assert chat(top_k=value).top_k == taken


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", "0.5"),
        ("seed", 2**63),
        ("seed", 2**64),
        ("seed", "7"),
        ("seed", 0.5),
        ("priority", 2**31),
        ("stream", "true"),
        ("stream", 1),
        ("ignore_eos", "no"),
        ("cache_salt", 7),
        ("cache_salt", "x" * 257),
        ("user", 5),
        ("user", "x" * 513),
        ("metadata", "x"),
        ("prompt_cache_key", []),
        ("stop_token_ids", [500]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["1"]),
        ("stop_token_ids", 3),
        ("stop_token_ids", list(range(257))),
        ("stop", ""),
        ("stop", ["", "x"]),
        ("stop", [1]),
        ("stop", 1),
        ("stop", "x" * (MAX_STOP_CHARS + 1)),
        ("stop", ["x"] * (MAX_STOPS + 1)),
        ("stream_options", {}),
        ("stream_options", {"include_usage": True}),
        ("n", 0),
        ("n", -1),
        ("n", "1"),
        ("n", True),
        ("model", 7),
    ],
)
def test_an_impossible_value_is_refused_by_the_name_of_its_field(field: str, value: Any) -> None:
    for make in (chat, completion):
        error = refusal(make, **{field: value})
        assert error.status.http == 400
        assert (error.param or "").startswith(field)
        assert field in error.message


@pytest.mark.parametrize("seed", [0, -1, 7, INT64_MAX, -INT64_MAX - 1])
def test_any_int64_is_a_seed(seed: int) -> None:
    assert chat(seed=seed).seed == seed


@pytest.mark.parametrize(
    ("stop", "taken"),
    [(None, ()), ([], ()), ("x", ("x",)), (["x", "x"], ("x",)), (["a", "b", "c", "d", "e"], ("a", "b", "c", "d", "e"))],
)
def test_stop_forms(stop: Any, taken: tuple[str, ...]) -> None:
    assert chat(stop=stop).stops == taken


@pytest.mark.parametrize(
    ("options", "asked"),
    [(None, False), ({}, False), ({"include_usage": None}, False), ({"include_usage": True}, True)],
)
def test_usage_in_a_stream_is_told_only_if_asked(options: Any, asked: bool) -> None:
    assert chat(stream=True, stream_options=options).include_usage is asked
    assert refusal(chat, stream=True, stream_options={"include_usage": 1}).param == "stream_options.include_usage"


@pytest.mark.parametrize("field", sorted(NOT_THERE))
def test_a_feature_that_is_not_there_is_refused_but_its_neutral_values_are_not(field: str) -> None:
    for make in (chat, completion):
        for neutral in (*NOT_THERE[field][0], None):
            assert field not in make(**{field: neutral}).ignored
        for value in ({"3": 1}, 5, "x", True):
            error = refusal(make, **{field: value})
            assert (error.code, error.param) == (ErrorCode.NOT_YET_SUPPORTED, field)


def test_several_choices_are_drawn_but_not_more_than_are_given_out() -> None:
    assert chat().n == chat(n=None).n == chat(n=1.0).n == 1
    assert chat(n=3, best_of=3).n == 3
    error = refusal(chat, n=2, best_of=3)
    assert (error.code, error.param) == (ErrorCode.NOT_YET_SUPPORTED, "best_of")
    assert refusal(chat, best_of=0).param == "best_of"


def test_unknown_fields_are_named_and_known_ones_without_effect_are_not() -> None:
    known = dict.fromkeys(KNOWN_WITHOUT_EFFECT)
    assert chat(**known, wibble=1, best_model=None).ignored == ("wibble", "best_model")


@pytest.mark.parametrize("model", [None, MODEL])
def test_the_only_model_serves_a_request_that_names_none(model: Any) -> None:
    assert chat(model=model).messages


@pytest.mark.parametrize("model", ["no-such", "", "Tiny", "tiny "])
def test_another_model_is_not_found(model: str) -> None:
    error = refusal(chat, model=model)
    assert (error.code, error.status.http, error.param) == (ErrorCode.MODEL_NOT_FOUND, 404, "model")


# --- prompts ---


@pytest.mark.parametrize(
    ("prompt", "taken"),
    [
        ("hi", ("hi",)),
        (" ", (" ",)),
        (["a", "b"], ("a", "b")),
        ([1, 2.0, 499], ((1, 2, 499),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
    ],
)
def test_prompt_forms(prompt: Any, taken: tuple[Any, ...]) -> None:
    assert completion_ask({"prompt": prompt}, MODEL, VOCAB).prompts == taken


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (None, "prompt"),
        ([], "prompt"),
        ([[]], "prompt[0]"),
        ([5, -1], "prompt[1]"),
        ([5, 10**9], "prompt[1]"),
        ([500], "prompt[0]"),
        ([1, "a"], "prompt[1]"),
        (["a", 1], "prompt[1]"),
        ([[1], "a"], "prompt[1]"),
        ([[1], [2.5]], "prompt[1][0]"),
        ([True], "prompt[0]"),
        ([None], "prompt[0]"),
        ({"text": "x"}, "prompt"),
        (5, "prompt"),
        (["a"] * (MAX_PROMPTS + 1), "prompt"),
    ],
)
def test_a_prompt_that_is_none_is_refused(prompt: Any, param: str) -> None:
    error = refusal(completion_ask, {"prompt": prompt}, MODEL, VOCAB)
    assert (error.status.http, error.param) == (400, param)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = [*NOT_THERE, *KNOWN_WITHOUT_EFFECT, "messages", "prompt", "stop", "stop_token_ids", "stream", "stream_options"]
FIELDS += ["temperature", "top_p", "top_k", "seed", "max_tokens", "min_tokens", "n", "model", "cache_salt", "priority"]


@settings(deadline=None, max_examples=300)
@given(body=st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=3))
def test_no_body_at_all_gives_anything_but_an_ask_or_a_refusal(body: dict[str, Any]) -> None:
    for check, base in ((chat_ask, {"messages": USER}), (completion_ask, {"prompt": "hi"})):
        try:
            check({**base, **body}, MODEL, VOCAB)
        except RequestError as exc:
            shown = json.dumps(exc.body(), ensure_ascii=False, allow_nan=False).encode()
            if exc.status.http not in (400, 404):
                pytest.fail(f"{exc.status.http} for {body}: {shown!r}")


def test_an_answer_without_a_limit_fills_the_context_but_no_more_than_the_workers_hold() -> None:
    ask = Ask(prompts=((1,),))
    assert ask.sampling(100, 1000).max_tokens == 900
    assert ask.sampling(100, 1000, capacity=400).max_tokens == 300
    assert ask.sampling(100, 1000, capacity=4000).max_tokens == 900
    assert ask.sampling(100, 1000, capacity=90).max_tokens == 900  # the worker says what it lacks
    assert Ask(prompts=((1,),), max_tokens=500).sampling(100, 1000, capacity=400).max_tokens == 500
