"""Token ids to text as they come: the deltas, joined, are the text of all ids, and no character is ever cut.

Byte-level tokenizers (most models) get an exact path: each id is its bytes, and an incremental UTF-8 decoder holds
back the bytes of an incomplete character. All others decode a short window of ids at each step and emit what has grown,
holding back while it ends in U+FFFD; there, bytes that never become a character may show differently than in one decode
of everything. Special tokens have no text.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
WINDOW_TOKENS = 64
"""Ids held back as an incomplete character at most; past these they go out as they are."""


class Detokenizer(Protocol):
    """State of one sequence."""

    def push(self, token_id: int) -> str:
        """New text; empty while a character is incomplete, or for a special token."""
        ...

    def flush(self) -> str:
        """What was held back, now that nothing follows: U+FFFD for bytes that are no character."""
        ...


class Detokenizers:
    """Makes a `Detokenizer` for each sequence of one tokenizer; keeps what they share."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        self._bytes_of = _TokenBytes(tokenizer, self._special) if is_byte_level(tokenizer) else None

    def make(self) -> Detokenizer:
        if self._bytes_of is not None:
            return _ByteDetokenizer(self._bytes_of)
        return _WindowDetokenizer(self._tokenizer, self._special)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to the text, in UTF-8; empty for a special one.

        Outside byte-level tokenizers a space at the start of a text is counted too, which decoding may leave out.
        """
        if self._bytes_of is not None:
            return self._bytes_of(token_id)
        name = "" if token_id in self._special else self.token_name(token_id)
        if byte := _BYTE_TOKEN.fullmatch(name):
            return bytes([int(byte[1], 16)])
        return name.replace("\u2581", " ").encode()

    def token_name(self, token_id: int) -> str:
        """A token as the vocabulary writes it; empty for an id that it does not have."""
        return self._tokenizer.id_to_token(token_id) or ""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of all ids at once, special tokens left out."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text


def is_byte_level(tokenizer: Tokenizer) -> bool:
    """True where a token's text is its bytes, each written as one character of GPT-2's alphabet."""
    decoder = json.loads(tokenizer.to_str()).get("decoder")
    return isinstance(decoder, dict) and decoder.get("type") == "ByteLevel"


def _byte_alphabet() -> dict[str, int]:
    """Character → byte. Printable Latin-1 stands for itself, the rest counts up from U+0100 (Source: GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_ALPHABET = _byte_alphabet()


class _TokenBytes:
    """Bytes of each token id, worked out at first use."""

    def __init__(self, tokenizer: Tokenizer, special: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = dict.fromkeys(special, b"")

    def __call__(self, token_id: int) -> bytes:
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._look_up(token_id)
        return found

    def _look_up(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if all(char in _ALPHABET for char in token):
            return bytes(_ALPHABET[char] for char in token)
        return str(token).encode()  # an added token, written as it is


class _ByteDetokenizer:
    def __init__(self, bytes_of: _TokenBytes) -> None:
        self._bytes_of = bytes_of
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._bytes_of(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDetokenizer:
    """ids[_start:_sent] are context whose text is out; ids[_sent:] are held back."""

    def __init__(self, tokenizer: Tokenizer, special: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._ids: list[int] = []
        self._sent = 0

    def push(self, token_id: int) -> str:
        if token_id in self._special:
            return ""
        self._ids.append(token_id)
        new = self._grown()
        if not new or (new.endswith(REPLACEMENT) and len(self._ids) - self._sent < WINDOW_TOKENS):
            return ""
        self._advance()
        return new

    def flush(self) -> str:
        new = self._grown()
        self._advance()
        return new

    def _grown(self) -> str:
        out = self._decode(self._ids[: self._sent])
        return self._decode(self._ids)[len(out) :]

    def _advance(self) -> None:
        self._ids = self._ids[self._sent :]
        self._sent = len(self._ids)

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text
