"""Prompts and chats to ids, off the event loop and within bounds; and what the router must never import."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import ConfigError
from services.protocol.errors import ErrorCode, RequestError
from services.router.text import LONG_TEXT_CHARS, SLICE_CHARS, Text, context_tokens
from tests.fronts import ids_of, make_card, tokenizer


@pytest.fixture
def text(tmp_path: Path) -> Iterator[Text]:
    made = Text(make_card(tmp_path), context=256)
    yield made
    made.close()


def make_text(folder: Path, context: int = 256, max_pending: int = 8, **card: Any) -> Text:
    return Text(make_card(folder, **card), context=context, max_pending=max_pending)


async def test_a_prompt_gets_the_tokenizers_own_ids(text: Text) -> None:
    assert await text.encode_prompt("Hello, world") == ids_of("Hello, world")


async def test_a_model_with_a_start_token_gets_it_once_in_front(tmp_path: Path) -> None:
    text = make_text(tmp_path, add_bos=True)
    assert await text.encode_prompt("Hello") == (1, *ids_of("Hello"))
    assert await text.encode_prompt("") == (1,)
    text.close()


async def test_an_empty_prompt_is_refused_where_there_is_no_start_token(text: Text) -> None:
    with pytest.raises(RequestError, match="empty") as caught:
        await text.encode_prompt("", "prompt[1]")
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_REQUEST, "prompt[1]")


async def test_a_chat_is_rendered_and_gets_no_second_start_token(tmp_path: Path) -> None:
    text = make_text(tmp_path, add_bos=True)
    ids = await text.encode_chat([{"role": "user", "content": "Hi"}])
    assert ids == ids_of("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    text.close()


async def test_decoding_is_the_inverse_of_encoding(text: Text) -> None:
    assert await text.decode(await text.encode_prompt("안녕, world 👨‍👩‍👧‍👦")) == "안녕, world 👨‍👩‍👧‍👦"


async def test_what_cannot_fit_is_refused_without_tokenizing(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "_encode", None)
    longest = max(len(token.encode()) for token in tokenizer().get_vocab())
    with pytest.raises(RequestError, match=r"at least 257 tokens.* 256 tokens") as caught:
        await text.encode_prompt("a" * (longest * 256 + 1))
    assert caught.value.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED


async def test_a_text_far_too_long_is_refused_before_all_of_it_is_tokenized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = make_text(tmp_path, context=10_000)
    encode, seen = text._encoding, []
    monkeypatch.setattr(text, "_encoding", lambda part: (seen.append(len(part)), encode(part))[1])
    with pytest.raises(RequestError, match=r"at least 10001 tokens.* 10000 tokens") as caught:
        await text.encode_prompt("x1 " * 50_000, "prompt[2]")
    assert (caught.value.code, caught.value.param) == (ErrorCode.CONTEXT_LENGTH_EXCEEDED, "prompt[2]")
    assert seen == [SLICE_CHARS]
    text.close()


async def test_a_long_text_that_fits_after_all_gets_the_ids_of_the_whole(tmp_path: Path) -> None:
    text = make_text(tmp_path, context=100_000, max_model_len=100_000)
    prompt = "The quick brown fox jumps over the lazy dog. " * 4000
    assert len(prompt) > 2 * SLICE_CHARS
    assert await text.encode_prompt(prompt) == ids_of(prompt)
    text.close()


async def test_a_long_text_holds_up_neither_the_loop_nor_short_texts(tmp_path: Path) -> None:
    text = make_text(tmp_path, context=10_000_000, max_model_len=10_000_000)
    encode, gate = text._encode, threading.Event()

    def gated(prompt: str, param: str) -> tuple[int, ...]:
        if len(prompt) > LONG_TEXT_CHARS:
            assert gate.wait(60)
        return encode(prompt, param)

    text._encode = gated  # type: ignore[method-assign]
    long = [asyncio.create_task(text.encode_prompt("ab " * LONG_TEXT_CHARS)) for _ in range(4)]
    for _ in range(3):
        assert await text.encode_prompt("short") == ids_of("short")
    assert not any(task.done() for task in long)
    gate.set()
    assert len({await task for task in long}) == 1
    text.close()


async def test_past_the_bound_a_prompt_is_refused_with_a_time_to_retry(tmp_path: Path) -> None:
    text = make_text(tmp_path, max_pending=2)
    results = await asyncio.gather(*(text.encode_prompt("hello") for _ in range(5)), return_exceptions=True)
    refused = [r for r in results if isinstance(r, RequestError)]
    assert [r.code for r in refused] == [ErrorCode.OVERLOADED] * 3
    assert refused[0].retry_after_s
    assert await text.encode_prompt("hello") == ids_of("hello")
    text.close()


async def test_a_template_that_refuses_is_a_clear_error(tmp_path: Path) -> None:
    text = make_text(tmp_path, chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        await text.encode_chat([{"role": "user", "content": "x"}])
    assert caught.value.param == "messages"
    text.close()


async def test_a_model_without_a_template_points_to_completions(tmp_path: Path) -> None:
    text = make_text(tmp_path, chat_template=None)
    with pytest.raises(RequestError, match="/v1/completions"):
        await text.encode_chat([{"role": "user", "content": "x"}])
    text.close()


async def test_a_template_cannot_reach_out_of_its_sandbox(tmp_path: Path) -> None:
    hostile = "{{ messages.__class__.__mro__[-1].__subclasses__() }}"
    text = make_text(tmp_path, chat_template=hostile)
    with pytest.raises(RequestError, match="template"):
        await text.encode_chat([{"role": "user", "content": "x"}])
    text.close()


def test_a_broken_template_and_a_broken_tokenizer_stop_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="template"):
        make_text(tmp_path, chat_template="{% for %}")
    card = make_card(tmp_path)
    card.tokenizer_path.write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Text(card, context=256)


def test_the_context_is_the_models_the_settings_or_8192(tmp_path: Path) -> None:
    assert context_tokens(make_card(tmp_path), 0) == 256
    assert context_tokens(make_card(tmp_path), 100) == 100
    assert context_tokens(make_card(tmp_path, max_model_len=131_072), 0) == 8192
    assert context_tokens(make_card(tmp_path, max_model_len=131_072), 20_000) == 20_000


def test_the_routers_fronts_never_load_torch_transformers_or_ray() -> None:
    code = (
        "import sys\n"
        "import services.router.serve, services.router.text, services.protocol.client\n"
        "heavy = {'torch', 'transformers', 'ray', 'services.engine', 'services.worker'} & set(sys.modules)\n"
        "sys.exit(f'loaded: {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
