"""One call written as a JSON object, read character by character, so that its arguments can be streamed.

    {"name": "f", "arguments": {…}}     the keys in any order; `parameters` is another name of `arguments`

It checks only as much JSON as it takes to find the parts: what stands in the arguments goes out as it is.
"""

from __future__ import annotations

import json
from enum import Enum, auto

ARGUMENT_KEYS = ("arguments", "parameters")
_SPACE = " \t\r\n"


class _At(Enum):
    START = auto()
    KEY = auto()  # before a key, or the end
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()  # before a value
    IN_VALUE = auto()
    DONE = auto()
    BAD = auto()


class CallScanner:
    """Feed it text from the opening brace on; where the ``name`` stands before it, from that of the arguments on."""

    def __init__(self, name: str | None = None) -> None:
        self.name = name
        self.raw = ""  # all that was read
        self._are_arguments_all = name is not None
        self._at = _At.VALUE if self._are_arguments_all else _At.START
        self._key = ARGUMENT_KEYS[0] if self._are_arguments_all else ""
        self._value = ""
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._arguments = ""  # not taken yet
        self._had_arguments = False

    @property
    def is_done(self) -> bool:
        return self._at is _At.DONE

    @property
    def is_bad(self) -> bool:
        """What was read is no call."""
        return self._at is _At.BAD

    def feed(self, text: str) -> str:
        """Read on; returns what stands behind the call, once that has ended."""
        for i, char in enumerate(text):
            if self._at in (_At.DONE, _At.BAD):
                return text[i:]
            self.raw += char
            self._step(char)
        return ""

    def take_arguments(self) -> str:
        """New text of the arguments; nothing before the name is known."""
        if self.name is None:
            return ""
        taken, self._arguments = self._arguments, ""
        if self.is_done and not self._had_arguments:
            self._had_arguments = True
            return "{}"
        return taken

    def _step(self, char: str) -> None:
        if self._at is _At.IN_VALUE:
            self._value_step(char)
        elif self._at is _At.IN_KEY:
            if char == '"' and not self._escaped:
                self._at = _At.COLON
            else:
                self._escaped = char == "\\" and not self._escaped
                self._key += char
        elif char not in _SPACE:
            self._between(char)

    def _between(self, char: str) -> None:
        """A character that opens or parts something."""
        if self._at is _At.START:
            self._at = _At.KEY if char == "{" else _At.BAD
        elif self._at is _At.COLON:
            self._at = _At.VALUE if char == ":" else _At.BAD
        elif self._at is _At.VALUE:
            self._value, self._depth, self._in_string, self._escaped = "", 0, False, False
            self._at = _At.IN_VALUE
            self._value_step(char)
        elif char == '"':
            self._at, self._key = _At.IN_KEY, ""
        elif char == "}":
            self._at = _At.DONE if self.name is not None else _At.BAD
        elif char != ",":
            self._at = _At.BAD

    def _value_step(self, char: str) -> None:
        if not self._in_string and not self._depth and self._value and char in ",}]" + _SPACE:
            self._end_value()  # of a number or a word
            if char not in _SPACE:
                self._between(char)
            return
        self._value += char
        if self._key in ARGUMENT_KEYS and self._value[0] in "{[":
            self._arguments += char
            self._had_arguments = True
        if self._in_string:
            if char == '"' and not self._escaped:
                self._in_string = False
            self._escaped = char == "\\" and not self._escaped
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        if not self._in_string and not self._depth and self._value[0] in '{["':
            self._end_value()

    def _end_value(self) -> None:
        self._at = _At.DONE if self._are_arguments_all else _At.KEY
        if self._key == "name":
            self.name = _text(self._value)
            if self.name is None:
                self._at = _At.BAD
        elif self._key in ARGUMENT_KEYS and self._value[0] not in "{[":
            self._arguments = _text(self._value) or "{}"  # some models write them as text that holds JSON
            self._had_arguments = True


def _text(raw: str) -> str | None:
    try:
        value = json.loads(raw)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
