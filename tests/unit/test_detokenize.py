"""Incremental detokenizing against one decode of all ids."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from services.router.detokenize import WINDOW_TOKENS, Detokenizers, is_byte_level
from tests.fronts import ids_of, tokenizer

FAMILY = "👨‍👩‍👧‍👦"
TEXTS = [
    "안녕하세요 세계",
    "नमस्ते दुनिया",
    FAMILY * 3,
    "日本語とASCII mixed 中文 text",
    "a\u0000b naïve café ﬁ",
    "\U0001f3f3\ufe0f\u200d\U0001f308 end",
]
VOCAB = tokenizer().get_vocab_size()


def deltas(made: Detokenizers, ids: list[int]) -> list[str]:
    detokenizer = made.make()
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


@cache
def byte_fallback() -> Tokenizer:
    """A SentencePiece-like tokenizer: pieces with ▁ for a space, and <0xNN> for bytes that no piece has."""
    pieces = ["<unk>", "<s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁the", "▁model", "s", "é", "▁한"]
    made = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>"))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<unk>", "<s>"])
    return made


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, VOCAB - 1), max_size=60))
@example(ids=[ids_of(FAMILY)[0], ids_of("A")[0]])
def test_joined_deltas_are_the_full_decode_of_any_ids(ids: list[int]) -> None:
    assert is_byte_level(tokenizer())
    assert "".join(deltas(Detokenizers(tokenizer()), ids)) == tokenizer().decode(ids, skip_special_tokens=True)


@settings(deadline=None)
@given(text=st.text(max_size=40))
def test_text_survives_and_no_character_is_ever_split(text: str) -> None:
    parts = deltas(Detokenizers(tokenizer()), list(ids_of(text)))
    assert "".join(parts) == text
    if "\ufffd" not in text:
        assert all("\ufffd" not in part for part in parts)


@pytest.mark.parametrize("text", TEXTS)
def test_scripts_and_emoji_come_through_whole(text: str) -> None:
    assert "".join(deltas(Detokenizers(tokenizer()), list(ids_of(text)))) == text


def test_special_tokens_have_no_text_and_added_ones_have_theirs() -> None:
    ids = [1, *ids_of("hi"), 2, tokenizer().token_to_id("<added é>")]
    assert "".join(deltas(Detokenizers(tokenizer()), ids)) == "hi<added é>"


def test_an_id_outside_the_vocabulary_has_no_text() -> None:
    assert "".join(deltas(Detokenizers(tokenizer()), [VOCAB + 5, *ids_of("x")])) == "x"


@settings(deadline=None)
@given(text=st.lists(st.sampled_from(["▁the", "▁model", "s", "é", "▁한", "▁", "<s>", "안", "👨", "ß"]), max_size=20))
def test_byte_fallback_pieces_join_to_the_full_decode(text: list[str]) -> None:
    made = byte_fallback()
    ids: list[int] = []
    for piece in text:
        known = made.token_to_id(piece)
        ids += [known] if known is not None else [made.token_to_id(f"<0x{b:02X}>") for b in piece.encode()]
    parts = deltas(Detokenizers(made), ids)
    assert not is_byte_level(made)
    assert "".join(parts) == made.decode(ids, skip_special_tokens=True)
    assert all("\ufffd" not in part for part in parts)


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 263), max_size=40))
def test_byte_fallback_loses_no_real_text_among_broken_bytes(ids: list[int]) -> None:
    made = byte_fallback()
    ids = [*ids, made.token_to_id("▁model")]
    assert "".join(deltas(Detokenizers(made), ids)).endswith("model")


def test_broken_bytes_are_not_held_back_for_ever() -> None:
    made = byte_fallback()
    broken = [made.token_to_id("<0x80>")] * (WINDOW_TOKENS * 2)
    assert "".join(deltas(Detokenizers(made), broken)[:-1]) != ""


def test_metaspace_words_keep_their_spaces() -> None:
    made = Tokenizer(models.WordLevel({"▁Hello": 0, "▁world": 1, "!": 2}, unk_token="!"))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    assert deltas(Detokenizers(made), [0, 1, 2, 1]) == ["Hello", " world", "!", " world", ""]
