"""Grammars without a model: a blind walker that takes any token that is allowed always ends in a valid text."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer

from services.engine import grammar
from services.engine.grammar import Grammars, fits_xgrammar
from services.protocol.errors import ErrorCode, RequestError
from services.protocol.grammar import GrammarSpec, check, closed, repeats_inside_repeats
from tests.conftest import make_byte_tokenizer
from tests.schemas import random_schema

VOCAB, EOS = 512, 2


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_byte_tokenizer(folder)
    return folder / "tokenizer.json"


@pytest.fixture(scope="module")
def grammars(tokenizer_file: Path) -> Iterator[Grammars]:
    made = Grammars(tokenizer_file, VOCAB, (EOS,))
    yield made
    made.close()


@pytest.fixture(scope="module")
def tokenizer(tokenizer_file: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tokenizer_file))


def spec_of(schema: Any) -> GrammarSpec:
    return GrammarSpec(kind="json_schema", text=json.dumps(schema))


def walk(grammars: Grammars, spec: GrammarSpec, dice: random.Random, limit: int = 400) -> list[int]:
    """Tokens up to the end token, which is taken as soon as it may come, in one case of two; the last ones are single
    bytes, so that the walk comes to its end."""
    ids: list[int] = []
    key = object()
    while len(ids) < limit:
        allowed = grammars.allowed(key, spec, ids).nonzero()[:, 0].tolist()
        assert allowed, f"nothing may follow {ids}"
        if EOS in allowed and (len(allowed) == 1 or dice.random() < 0.5):
            return ids
        ids.append(dice.choice([i for i in allowed if i != EOS]))
    raise AssertionError(f"no end within {limit} tokens of {spec}")


def text_of(tokenizer: Tokenizer, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids)
    return text


@pytest.mark.parametrize("seed", range(60))
def test_a_blind_walk_through_a_schema_ends_in_a_valid_document(
    grammars: Grammars, tokenizer: Tokenizer, seed: int
) -> None:
    dice = random.Random(seed)
    schema = random_schema(dice)
    check(spec_of(schema))
    text = text_of(tokenizer, walk(grammars, spec_of(schema), dice, 2000))
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError) as exc:
        raise AssertionError(f"seed {seed}: {text} under {schema}: {exc}") from None


@pytest.mark.parametrize("pattern", ["[0-9]{3}-[a-z]{2}", "(yes|no)+!", "a*b{2,4}c?", r"\d+(\.\d{1,2})? (EUR|USD)"])
def test_a_blind_walk_through_a_regex_matches_it(grammars: Grammars, tokenizer: Tokenizer, pattern: str) -> None:
    for seed in range(5):
        ids = walk(grammars, GrammarSpec(kind="regex", text=pattern), random.Random(seed))
        assert re.fullmatch(pattern, text_of(tokenizer, ids)), (seed, ids)


def test_a_blind_walk_through_a_choice_is_one_of_its_texts(grammars: Grammars, tokenizer: Tokenizer) -> None:
    texts = ["yes", "yes, sir", 'a "quoted" one', "line\nbreak", "größe"]
    spec = GrammarSpec(kind="choice", text=json.dumps(texts))
    found = {text_of(tokenizer, walk(grammars, spec, random.Random(seed))) for seed in range(60)}
    assert found == set(texts)


@pytest.mark.parametrize(
    "text",
    ['root ::= "<" inner ">"\ninner ::= "a" | "(" inner ")"', 'start: "<" inner ">"\ninner: "a" | "(" inner ")"'],
)
def test_a_blind_walk_through_a_grammar_is_in_its_language(grammars: Grammars, tokenizer: Tokenizer, text: str) -> None:
    for seed in range(5):
        ids = walk(grammars, GrammarSpec(kind="grammar", text=text), random.Random(seed))
        found = text_of(tokenizer, ids)
        depth = found.count("(")
        assert found == "<" + "(" * depth + "a" + ")" * depth + ">", seed


@pytest.mark.parametrize("seed", range(12))
def test_a_matcher_made_again_from_its_outputs_says_the_same(grammars: Grammars, seed: int) -> None:
    dice = random.Random(seed)
    spec = spec_of(random_schema(dice))
    ids = walk(grammars, spec, dice, 2000)
    kept = object()
    for length in range(len(ids) + 1):
        along = grammars.allowed(kept, spec, ids[:length])
        again = grammars.allowed(object(), spec, ids[:length])
        assert along.equal(again), (seed, length)


def test_one_library_accepts_what_the_other_lets_come(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whose xgrammar was too late goes on with what another one's began."""
    specs = [(seed, spec_of(random_schema(random.Random(seed)))) for seed in range(40)]
    specs = [(seed, spec) for seed, spec in specs if fits_xgrammar(spec)]
    assert len(specs) >= 10
    walks = [(spec, walk(grammars, spec, random.Random(seed), 2000)) for seed, spec in specs]
    monkeypatch.setattr(grammar, "XGRAMMAR_LIMIT_S", -1.0)
    late = Grammars(*grammars.vocabulary)
    for spec, ids in walks:
        assert late.allowed(object(), spec, ids)[EOS], spec
    late.close()


def test_outputs_that_leave_the_grammar_are_told(grammars: Grammars, tokenizer: Tokenizer) -> None:
    spec = GrammarSpec(kind="regex", text="[0-9]+")
    ids = tokenizer.encode("1a").ids
    with pytest.raises(RequestError, match=r"output token 1 .* does not follow the regex"):
        grammars.allowed(object(), spec, ids)


def test_schemas_that_xgrammar_reads_too_widely_are_not_its_own() -> None:
    for schema in (
        {"type": "integer", "not": {"const": 3}},
        {"type": "array", "uniqueItems": True},
        {"allOf": [{"type": "integer"}, {"minimum": 3}]},
        {"type": "string", "pattern": "b"},
        {"anyOf": [{"type": "integer"}], "type": "string"},
        {"type": "object", "properties": {}, "required": ["a"]},
        {"properties": {"a": {"oneOf": [True]}}},
    ):
        assert not fits_xgrammar(spec_of(schema)), schema
    assert fits_xgrammar(spec_of({"type": "object", "properties": {"pattern": {"type": "string"}}}))


def test_objects_that_list_their_properties_are_closed() -> None:
    schema = {"properties": {"a": {"type": "array", "items": {"properties": {"b": {}}}}}, "enum": [{"properties": {}}]}
    narrowed = closed(schema)
    assert narrowed["additionalProperties"] is False
    assert narrowed["properties"]["a"]["items"]["additionalProperties"] is False
    assert narrowed["enum"] == [{"properties": {}}]
    for open_one in (
        {"type": "object"},
        {"properties": {}, "additionalProperties": True},
        {"allOf": [{"properties": {}}]},
        {"properties": {"a": True}, "anyOf": [{"properties": {"b": True}}]},
        {"properties": {"a": True}, "required": ["b"]},
    ):
        assert closed(open_one) == open_one


def nested(levels: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema, "maxItems": 2}
    return schema


HOSTILE = {
    "a thousand levels": GrammarSpec(kind="json_schema", text="[" * 1000 + "]" * 1000),
    "40 levels": spec_of(nested(40)),
    "a huge enum": spec_of({"enum": [f"value {i}" for i in range(1001)]}),
    "a huge choice": GrammarSpec(kind="choice", text=json.dumps([str(i) for i in range(1001)])),
    "a long regex": GrammarSpec(kind="regex", text="a" * 5000),
    "a long grammar": GrammarSpec(kind="grammar", text='root ::= "a"\n' * 20_000),
    "an unclosed group": GrammarSpec(kind="regex", text="(a"),
    "look-ahead": GrammarSpec(kind="regex", text="(?=a)b"),
    "an unknown type": spec_of({"type": "strin"}),
    "a list of types": spec_of({"type": [["string"]]}),
    "required that is no list": spec_of({"type": "object", "properties": {"a": {}}, "required": 5}),
    "required that holds no names": spec_of({"type": "object", "properties": {"a": {}}, "required": [["a"]]}),
    "an enum that is no list": spec_of({"enum": 5}),
    "properties that are none": spec_of({"type": "object", "properties": [1]}),
    "no such rule": GrammarSpec(kind="grammar", text="start: other"),
    "broken EBNF": GrammarSpec(kind="grammar", text="root ::= "),
    "a reference to nothing": spec_of({"$ref": "#/$defs/none"}),
    "a reference to elsewhere": spec_of({"$ref": "https://example.invalid/schema.json"}),
    "an endless document": spec_of({"$ref": "#"}),
    "a pattern without end": spec_of({"type": "string", "pattern": "(a|a)*("}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_specification_is_refused_and_the_next_one_works(grammars: Grammars, name: str) -> None:
    with pytest.raises(RequestError) as caught:
        grammars.compile(HOSTILE[name]).result(20)
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert 10 < len(caught.value.message) < 500
    assert int(grammars.allowed(object(), GrammarSpec(kind="regex", text="[0-9]"), []).sum()) == 10


def chain(rule: str, levels: int, start: str) -> GrammarSpec:
    rules = "\n".join(rule.format(i, i + 1) for i in range(levels))
    return GrammarSpec(kind="grammar", text=f'{start} r0\n{rules}\n{rule.split()[0].format(levels, "")} "a"')


BOMBS = {
    "nested counts": GrammarSpec(kind="regex", text="(((a{1,100}){1,100}){1,100}){1,100}"),
    "wide counts": GrammarSpec(kind="regex", text="((a|b)*c){1,1000}(x{1,999}y{1,999}){1,999}"),
    "ambiguity": GrammarSpec(kind="regex", text="(.*a.{30}){30}"),
    "backtracking": GrammarSpec(kind="regex", text="(a+)+(b|ab)*c" * 40),
    "many stars": GrammarSpec(kind="regex", text="|".join(f"(a{i}|b*)*" for i in range(300))),
    "counts in EBNF": GrammarSpec(kind="grammar", text='root ::= ((("a"{1,1000}){1,1000}){1,1000}){1,1000}'),
    "counts over rules": GrammarSpec(kind="grammar", text='root ::= a{1,1000}\na ::= b{1,1000}\nb ::= "b"{1,1000}'),
    "counts in Lark": GrammarSpec(kind="grammar", text='start: ((("a"{1,1000}){1,1000}){1,1000}){1,1000}'),
    "recursion on both sides": GrammarSpec(kind="grammar", text='root ::= root root | "a" | ""'),
    "parentheses in EBNF": GrammarSpec(kind="grammar", text=f'root ::= {"(" * 30_000}"a"{")" * 30_000}'),
    "parentheses in Lark": GrammarSpec(kind="grammar", text=f'start: {"(" * 30_000}"a"{")" * 30_000}'),
    "a chain in Lark": chain("r{0}: r{1}", 3000, "start:"),
    "a chain in EBNF": chain("r{0} ::= r{1} r{1}", 150, "root ::="),
    "a chain of references": spec_of(
        {
            "$ref": "#/$defs/d0",
            "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(1000)} | {"d1000": {"type": "null"}},
        }
    ),
    "a tree of references": spec_of(
        {
            "$ref": "#/$defs/d0",
            "$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)}
            | {"d60": {"const": 1}},
        }
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_or_followed_within_seconds(grammars: Grammars, name: str) -> None:
    spec = BOMBS[name]
    with suppress(RequestError):
        check(spec)
        grammars.compile(spec).result(20)
        ids: list[int] = []
        for _ in range(30):
            allowed = grammars.allowed(name, spec, ids).nonzero()[:, 0].tolist()
            ids += [i for i in allowed if i != EOS][-1:]
    assert int(grammars.allowed(object(), GrammarSpec(kind="regex", text="[0-9]"), []).sum()) == 10


def test_repetition_inside_repetition_is_seen() -> None:
    for text in ("(a*)*", "(a+|b){2}", "((x{1,3}))+", 'root ::= ("a" b*)+', "(a(b*)c)*", "(a?b+){3}"):
        assert repeats_inside_repeats(text), text
    for text in (
        "a*b+",
        "(ab)+",
        "(a|b)*c{3}",
        r"\d+(\.\d{1,2})? (EUR|USD)",
        "([*+]){2}",
        r"(\*\+)+",
        '("a*b+")+',
        "(a*)?",
        ")*",
    ):
        assert not repeats_inside_repeats(text), text
