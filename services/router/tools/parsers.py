"""Calls found in what a model writes, in the formats of the common model families.

hermes        text <tool_call>{"name": …, "arguments": {…}}</tool_call> …    Qwen, Hermes, and our own instructions
llama3_json   {"name": …, "parameters": {…}}; {…}                             Llama 3, from the answer's start
mistral       text [TOOL_CALLS][{"name": …, "arguments": {…}}, …], or name{…} Mistral

What is no call, or calls a function that was not offered, is text, as the model wrote it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from services.router.tools.scanner import CallScanner
from services.router.tools.spec import NAMED, REQUIRED, Tools

HERMES, LLAMA3_JSON, MISTRAL = "hermes", "llama3_json", "mistral"
FORMATS = (HERMES, LLAMA3_JSON, MISTRAL)
MARKERS = {HERMES: ("<tool_call>", "</tool_call>"), MISTRAL: ("[TOOL_CALLS]", ""), LLAMA3_JSON: ("", "")}
"""What stands before and after calls; tokens of these names are shown as text though they are special."""
_BETWEEN = " \t\r\n,;[]"


@dataclass(frozen=True, slots=True)
class CallDelta:
    """What is new of one call. ``id`` and ``name`` stand in its first delta only."""

    index: int  # of the call in its answer
    id: str = ""
    name: str = ""
    arguments: str = ""  # a piece of JSON text


@dataclass(frozen=True, slots=True)
class Parsed:
    text: str = ""
    calls: tuple[CallDelta, ...] = ()  # at most one for each index


class CallParser(Protocol):
    """State of one answer."""

    @property
    def is_over(self) -> bool:
        """Nothing that follows is wanted: the one call that may be is complete."""
        ...

    @property
    def has_called(self) -> bool: ...
    def push(self, text: str) -> Parsed: ...
    def flush(self) -> Parsed:
        """What was held back, now that nothing follows."""
        ...


@dataclass(frozen=True, slots=True)
class CallReading:
    """How calls are found in one answer: ``marks`` are special tokens, by id, that the parser reads as text."""

    parser: CallParser
    marks: Mapping[int, str]


def make_parser(tools: Tools, form: str) -> CallParser:
    """The parser of one answer to a request that offers tools."""
    if tools.choice == NAMED:
        return _NamedParser(tools.named, new_call_id(form))
    opening, closing = ("", "") if tools.choice == REQUIRED else MARKERS[form]
    return _MarkedParser(opening, closing, tools, lambda: new_call_id(form))


def new_call_id(form: str) -> str:
    """Mistral's templates take nothing but nine letters or digits."""
    return secrets.token_hex(5)[:9] if form == MISTRAL else f"call_{secrets.token_hex(12)}"


class _NamedParser:
    """The whole answer is the arguments of one function."""

    is_over = False

    def __init__(self, name: str, call_id: str) -> None:
        self._name, self._id = name, call_id
        self.has_called = False

    def push(self, text: str) -> Parsed:
        if not text:
            return Parsed()
        is_first, self.has_called = not self.has_called, True
        if is_first:
            return Parsed(calls=(CallDelta(0, self._id, self._name, text),))
        return Parsed(calls=(CallDelta(0, arguments=text),))

    def flush(self) -> Parsed:
        return Parsed()


class _MarkedParser:
    """Text, and calls behind a mark; without a mark, calls from the start or none at all.

    text ──mark──► calls ──{──► call ──}──► calls ──closing mark, or anything else──► text
    """

    def __init__(self, opening: str, closing: str, tools: Tools, new_id: Callable[[], str]) -> None:
        self._opening, self._closing = opening, closing
        self._names = tools.names
        self._is_parallel = tools.is_parallel
        self._new_id = new_id
        self._held = ""  # read, but not decided yet
        self._passed = ""  # between calls: what goes out as text where no call comes
        self._is_inside = not opening
        self._is_quiet = True  # nothing but blanks since the start, or since the last call
        self._call: CallScanner | None = None
        self._begun = False  # the running call has been told
        self._count = 0
        self._text: list[str] = []
        self._calls: dict[int, CallDelta] = {}

    @property
    def has_called(self) -> bool:
        return self._count > 0 or self._begun

    @property
    def is_over(self) -> bool:
        return self._count > 0 and not self._is_parallel

    def push(self, text: str) -> Parsed:
        self._held += text
        while self._held and not self.is_over and self._advance():
            pass
        return self._taken()

    def flush(self) -> Parsed:
        if not self.is_over:
            if self._call is not None:
                self._give_up_call()
            self._say(self._worth(self._passed) + self._held)
        self._held = self._passed = ""
        return self._taken()

    def _taken(self) -> Parsed:
        parsed = Parsed("".join(self._text), tuple(self._calls.values()))
        self._text, self._calls = [], {}
        return parsed

    def _advance(self) -> bool:
        """One step; False where more text is needed."""
        if self._call is not None:
            return self._read_call(self._call)
        return self._read_between() if self._is_inside else self._read_text()

    def _read_text(self) -> bool:
        before, mark, after = self._held.partition(self._opening) if self._opening else (self._held, "", "")
        if mark:
            is_blank = self._is_quiet and not before.strip()
            if not is_blank:
                self._say(before)
            self._held, self._passed, self._is_inside = after, (before if is_blank else "") + mark, True
            return True
        sure = before[: len(before) - _overlap(before, self._opening)]
        if not self._is_quiet or sure.strip():
            self._say(sure)
            self._held = before[len(sure) :]
        return False

    def _read_between(self) -> bool:
        if self._closing and self._held.startswith(self._closing):
            if self.has_called:
                self._passed = ""
            self._leave(self._held[len(self._closing) :], self._passed and self._passed + self._closing)
            return True
        if self._opening and self._held.startswith(self._opening):
            self._pass(len(self._opening))
            return True
        if self._closing.startswith(self._held) or self._opening.startswith(self._held):
            return False
        char = self._held[0]
        if char == "{":
            self._call, self._begun = CallScanner(), False
            return True
        named = self._named_call() if self._opening == MARKERS[MISTRAL][0] else None
        if named is not None:
            return named
        if char not in _BETWEEN:
            self._leave(self._held, self._passed)
            return True
        self._pass(1)
        return True

    def _pass(self, count: int) -> None:
        self._passed += self._held[:count]
        self._held = self._held[count:]

    def _worth(self, passed: str) -> str:
        """What stands between and after calls is no text; the same without a call is."""
        return "" if self.has_called and not passed.strip(_BETWEEN) else passed

    def _named_call(self) -> bool | None:
        """Mistral's newer form, name{…} or name[ARGS]{…}; whether it goes on. None: it is not that."""
        if self._held[0] in _BETWEEN:
            return None
        name, brace, rest = self._held.partition("{")
        name = name.removesuffix("[ARGS]").strip()
        if not brace:
            might_be = any(known.startswith(name.partition("[")[0]) for known in self._names)
            return False if might_be else None
        if name not in self._names:
            return None
        self._call, self._begun, self._held = CallScanner(name), False, brace + rest
        return True

    def _leave(self, rest: str, passed: str) -> None:
        """Back to text; without a mark there is no way into calls again."""
        self._is_inside = False
        self._passed = ""
        self._say(self._worth(passed))
        self._held = rest

    def _read_call(self, call: CallScanner) -> bool:
        self._held = call.feed(self._held)
        if call.is_bad or (call.name is not None and call.name not in self._names):
            self._give_up_call()
            return bool(self._held)
        self._tell(call)
        if call.is_done:
            self._end_call()
        return bool(self._held)

    def _tell(self, call: CallScanner) -> None:
        if call.name is None:
            return
        index, arguments = self._count, call.take_arguments()
        if not self._begun:
            self._begun = True
            self._calls[index] = CallDelta(index, self._new_id(), call.name, arguments)
        elif arguments:
            old = self._calls.get(index, CallDelta(index))
            self._calls[index] = CallDelta(index, old.id, old.name, old.arguments + arguments)

    def _end_call(self) -> None:
        self._call, self._begun, self._passed = None, False, ""
        self._count += 1
        self._is_quiet = True

    def _give_up_call(self) -> None:
        """No call after all: text, where nothing of it was told."""
        call = self._call
        if self._begun:
            self._end_call()
            return
        self._call = None
        self._is_inside = False
        self._say(self._passed + (call.raw if call is not None else ""))
        self._passed = ""

    def _say(self, text: str) -> None:
        """Text goes out; blanks around calls do not."""
        if not text or (self._is_quiet and self.has_called and not text.strip()):
            return
        self._is_quiet = False
        self._text.append(text)


def _overlap(text: str, mark: str) -> int:
    """Characters at the end of ``text`` that may begin ``mark``."""
    for size in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-size:]):
            return size
    return 0
