"""Answers of the default model under random schemas: each that ends is valid, nearly all end, the rest could go on.

Answers are greedy, so the share that ends is a fact of this model and not of luck.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer

from services.engine.loader import LoadedModel
from services.engine.messages import Sampling
from services.protocol.grammar import GrammarSpec, check
from tests.engine_harness import Harness, sequence
from tests.golden.test_engine_logprobs import hand_off
from tests.schemas import random_schema

LIMIT = 512
QUICK, ALL = range(12), range(200)


def spec_of(schema: dict[str, Any]) -> GrammarSpec:
    spec = GrammarSpec(kind="json_schema", text=json.dumps(schema))
    check(spec)
    return spec


def prompt_of(tokenizer: Tokenizer, schema: dict[str, Any]) -> list[int]:
    asked = f"Give an example as JSON: {', '.join(schema['properties'])}."
    text = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
    ids: list[int] = tokenizer.encode(text).ids
    return ids


def completed(harness: Harness, spec: GrammarSpec, ids: list[int], dice: random.Random) -> list[int]:
    """A way to go on to the end, taken blindly among what is allowed."""
    key, end = object(), set(harness.limits.eos_token_ids)
    while True:
        allowed = harness.grammars.allowed(key, spec, ids).nonzero()[:, 0].tolist()
        if end & set(allowed):
            return ids
        ids = [*ids, dice.choice(allowed)]


def run_schemas(model: LoadedModel, seeds: range) -> None:
    tokenizer = Tokenizer.from_file(str(model.card.tokenizer_path))
    harness = Harness(model, num_blocks=2048, max_num_seqs=32)
    schemas = {f"seed-{seed}": random_schema(random.Random(seed)) for seed in seeds}
    for name, schema in schemas.items():
        sampling = Sampling(max_tokens=LIMIT, grammar=spec_of(schema))
        harness.send(sequence(name, prompt_of(tokenizer, schema), sampling=sampling))
    harness.run(100_000)
    ended = 0
    for name, schema in schemas.items():
        output, ids = harness.end(name), harness.tokens(name)
        assert output.finish_reason in ("stop", "length"), (name, output.error)
        if output.finish_reason == "stop":
            ended += 1
            assert ids[-1] in harness.limits.eos_token_ids, name
            ids = ids[:-1]
        else:
            assert len(ids) == LIMIT, name
            ids = completed(harness, spec_of(schema), ids, random.Random(name))
        text = tokenizer.decode(ids)
        try:
            jsonschema.validate(json.loads(text), schema)
        except (ValueError, jsonschema.ValidationError) as exc:
            raise AssertionError(f"{name}, {output.finish_reason}: {text!r} under {schema}: {exc}") from None
    assert ended >= 0.95 * len(schemas), f"{ended} of {len(schemas)} ended within {LIMIT} tokens"


def test_answers_under_a_few_random_schemas_are_valid(model: LoadedModel) -> None:
    run_schemas(model, QUICK)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_answers_under_200_random_schemas_are_valid(model: LoadedModel) -> None:
    run_schemas(model, ALL)


def test_an_answer_is_the_same_in_company_preempted_and_moved(model: LoadedModel, default_model_folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model.card.tokenizer_path))
    city = {"type": "string", "minLength": 60, "maxLength": 90}
    schema = {"type": "object", "properties": {"city": city}, "required": ["city"]}
    sampling = Sampling(temperature=0.9, seed=3, max_tokens=90, grammar=spec_of(schema))
    prompt = prompt_of(tokenizer, schema)
    alone = Harness(model, num_blocks=64)
    alone.send(sequence("a", prompt, sampling=sampling))
    alone.run()
    expected = alone.tokens("a")
    assert alone.end("a").finish_reason == "stop"
    jsonschema.validate(json.loads(tokenizer.decode(expected[:-1])), schema)

    tight = Harness(model, num_blocks=-(-(len(prompt) + 90) // 16))
    other = replace(sampling, grammar=GrammarSpec(kind="regex", text="[a-z]{500}"))
    tight.send(
        sequence("b", prompt, sampling=other, named=False), sequence("a", prompt, sampling=sampling, named=False)
    )
    tight.run()
    assert tight.engine.stats().preemptions
    assert tight.tokens("a") == expected
    assert hand_off(model, prompt, sampling).tokens("a") == expected


def test_a_bad_grammar_ends_its_request_and_no_other(model: LoadedModel) -> None:
    harness = Harness(model, num_blocks=64)
    bad = Sampling(max_tokens=8, grammar=GrammarSpec(kind="regex", text="("))
    harness.send(sequence("good", range(20), sampling=Sampling(max_tokens=8, ignore_eos=True)))
    harness.send(sequence("bad", range(20), sampling=bad))
    harness.send(
        sequence("also good", range(20), sampling=replace(bad, grammar=GrammarSpec(kind="regex", text="a{3}")))
    )
    harness.run()
    assert harness.end("bad").error_code == "invalid_request"
    assert not harness.tokens("bad")
    assert len(harness.tokens("good")) == 8
    assert harness.end("also good").finish_reason == "stop"


def test_ignored_end_tokens_and_min_tokens_do_not_outlive_the_grammar(model: LoadedModel) -> None:
    harness = Harness(model, num_blocks=64)
    spec = GrammarSpec(kind="choice", text='["yes", "no"]')
    harness.send(
        sequence("a", range(20), sampling=Sampling(max_tokens=30, min_tokens=20, ignore_eos=True, grammar=spec))
    )
    harness.run()
    assert harness.end("a").finish_reason == "stop"
    assert len(harness.tokens("a")) < 10


def test_a_waiting_sequence_can_be_aborted(model: LoadedModel) -> None:
    from services.engine.messages import AbortSequence

    harness = Harness(model, num_blocks=64)
    harness.send(sequence("a", range(20), sampling=Sampling(grammar=GrammarSpec(kind="regex", text="a+"))))
    harness.send(AbortSequence(seq_id="a"))
    harness.run()
    assert harness.end("a").finish_reason == "abort"
    assert not harness.tokens("a")
