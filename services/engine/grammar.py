"""Masks of what a grammar lets come next, for sequences that have one.

    compile(spec) ─► in a thread: bounds ─► xgrammar ──cannot, or takes too long──► llguidance ─► Compiled
    allowed(key, spec, outputs) ─► the matcher of that answer, fed what it has not seen ─► [vocab] bool

A matcher is a function of its outputs: one that is not kept, or that was kept elsewhere, is made again from them, so
hand-offs, preemptions and recomputes need nothing else. xgrammar reads some JSON schemas more widely than they are
meant; those go to llguidance at once (`fits_xgrammar`), so that an answer is never wrong, only slower to mask.
"""

from __future__ import annotations

import json
import os
import time
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

import numpy as np
import torch

from services.protocol.errors import RequestError, invalid
from services.protocol.grammar import (
    GrammarSpec,
    all_schemas,
    check,
    guidance_source,
    one_line,
    repeats_inside_repeats,
    required_names,
    schema_text,
)

XGRAMMAR_LIMIT_S = 2.0
"""A grammar that xgrammar has not compiled by then is llguidance's; what is late ends by itself, unused."""
MASK_LIMIT_S = 0.25
"""CPU seconds for the mask of one step; what needs more ends, as all others wait for it."""
MAX_COMPILED = 128
MAX_MATCHERS = 512
_NOTES = {
    *("title", "description", "default", "examples", "$schema", "$id", "$comment"),
    *("deprecated", "readOnly", "writeOnly"),
}
_PLAIN_KEYS = _NOTES | {
    *("type", "properties", "required", "additionalProperties", "items", "minItems", "maxItems", "enum", "const"),
    *("anyOf", "$ref", "$defs", "definitions", "minLength", "maxLength"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
}
"""Of JSON schema: what xgrammar keeps to."""


Mask = np.ndarray[Any, np.dtype[np.uint8]]


class Matcher(Protocol):
    """Where one answer stands in its grammar."""

    def accept(self, token_id: int) -> bool:
        """False: the token does not belong here; the matcher is of no use any more."""
        ...

    def bitmask(self) -> Mask:
        """A bit for each token of the vocabulary, the lowest bit of each byte first. Raises ValueError where the
        grammar is too much for the library."""
        ...


class Compiled(Protocol):
    def matcher(self) -> Matcher: ...


def fits_xgrammar(spec: GrammarSpec) -> bool:
    """Whether xgrammar lets no answer come that the specification forbids, in bounded time."""
    if spec.kind == "regex":
        return not repeats_inside_repeats(spec.text)
    if spec.kind == "grammar":  # its rules may repeat one another, so counts are left to the library with a bound
        return spec.is_ebnf and "{" not in spec.text and not repeats_inside_repeats(spec.text)
    if spec.kind == "choice":
        return True
    return all(_is_plain(schema) for schema in all_schemas(json.loads(spec.text)))


def _is_plain(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return True
    keys = set(schema) - _NOTES
    if not keys <= _PLAIN_KEYS:
        return False
    if {"anyOf", "enum", "const", "$ref"} & keys and len(keys - {"$defs", "definitions", "type"}) > 1:
        return False  # it looks at one of them and forgets the others
    if {"anyOf", "$ref"} & keys and "type" in keys:
        return False
    choices = schema.get("enum")
    values = [*(choices if isinstance(choices, list) else ()), schema.get("const")]
    if any(isinstance(value, list | dict) for value in values):
        return False  # it writes them without spaces
    if not str(schema.get("$ref", "#/")).startswith("#/"):
        return False
    properties = schema.get("properties")
    return required_names(schema) <= (properties.keys() if isinstance(properties, Mapping) else set())


class _Xgrammar:
    """Made once; the compiler is safe to use from several threads."""

    def __init__(self, tokenizer: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        import xgrammar
        from transformers import PreTrainedTokenizerFast

        info = xgrammar.TokenizerInfo.from_huggingface(
            PreTrainedTokenizerFast(tokenizer_file=str(tokenizer)),  # type: ignore[no-untyped-call]
            vocab_size=vocab_size,
            stop_token_ids=list(eos_token_ids),
        )
        self._library = xgrammar
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._vocab_size = vocab_size
        printable = np.ones(-(-vocab_size // 32) * 32, dtype=np.uint8)
        for token_id, data in enumerate(info.decoded_vocab):
            printable[token_id] = not any(byte < 0x20 for byte in data)
        self._printable: Mask = np.packbits(printable, bitorder="little")

    def compile(self, spec: GrammarSpec) -> Compiled:
        """Raises RuntimeError for what it cannot read."""
        if spec.kind == "json_schema":
            made = self._compiler.compile_json_schema(schema_text(spec), any_whitespace=False, strict_mode=False)
        elif spec.kind == "regex":
            made = self._compiler.compile_regex(spec.text)
        elif spec.kind == "choice":
            texts = (json.dumps(text, ensure_ascii=False) for text in json.loads(spec.text))
            made = self._compiler.compile_grammar("root ::= " + " | ".join(texts))
        else:
            made = self._compiler.compile_grammar(spec.text)
        keep = self._printable if spec.kind == "json_schema" else None
        return _XgrammarCompiled(self._library, made, self._vocab_size, keep)


@dataclass(frozen=True, slots=True)
class _XgrammarCompiled:
    library: Any
    grammar: Any
    vocab_size: int
    keep: Mask | None  # of JSON: tokens without control characters, which it lets into strings of bounded length

    def matcher(self) -> Matcher:
        words = self.library.allocate_token_bitmask(1, self.vocab_size)
        return _XgrammarMatcher(self.library.GrammarMatcher(self.grammar), words, self.keep)


@dataclass(frozen=True, slots=True)
class _XgrammarMatcher:
    inner: Any
    words: torch.Tensor  # [1, vocab / 32] int32
    keep: Mask | None

    def accept(self, token_id: int) -> bool:
        return bool(self.inner.accept_token(token_id))

    def bitmask(self) -> Mask:
        self.inner.fill_next_token_bitmask(self.words)
        mask: Mask = self.words.numpy().view(np.uint8)[0]
        return mask if self.keep is None else mask & self.keep


class _Guidance:
    def __init__(self, tokenizer: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        from llguidance import LLTokenizer

        self._tokenizer = LLTokenizer(str(tokenizer), n_vocab=vocab_size, eos_token=list(eos_token_ids))

    def compile(self, spec: GrammarSpec) -> Compiled:
        """Raises ValueError for what it cannot read."""
        from llguidance import LLMatcher

        first = LLMatcher(self._tokenizer, guidance_source(spec), log_level=0)
        if first.is_error():
            raise ValueError(first.get_error())
        return _GuidanceCompiled(first)


@dataclass(frozen=True, slots=True)
class _GuidanceCompiled:
    first: Any

    def matcher(self) -> Matcher:
        return _GuidanceMatcher(self.first.deep_copy())


@dataclass(frozen=True, slots=True)
class _GuidanceMatcher:
    inner: Any

    def accept(self, token_id: int) -> bool:
        return bool(self.inner.consume_token(token_id))

    def bitmask(self) -> Mask:
        mask: Mask = np.frombuffer(self.inner.compute_bitmask(), dtype=np.uint8)
        if self.inner.is_error():
            raise ValueError(one_line(self.inner.get_error()))
        return mask


@dataclass(slots=True)
class _Place:
    matcher: Matcher
    seen: list[int] = field(default_factory=list)


class Grammars:
    """Compiles grammars and keeps the matchers of one engine. All calls come from its step loop."""

    def __init__(self, tokenizer: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Starts no thread and loads no library; the first grammar does."""
        self.vocabulary = (tokenizer, vocab_size, tuple(eos_token_ids))
        self._vocab_size = vocab_size
        self._compiled: OrderedDict[GrammarSpec, Future[Compiled]] = OrderedDict()
        self._places: OrderedDict[Hashable, _Place] = OrderedDict()
        cpus = os.sched_getaffinity(0)  # the step loop may come to be pinned; these threads are not to crowd its CPU
        self._threads = ThreadPoolExecutor(2, "pdray-grammar", os.sched_setaffinity, (0, cpus))
        self._xgrammar_thread = ThreadPoolExecutor(1, "pdray-xgrammar", os.sched_setaffinity, (0, cpus))
        self._late: Future[Compiled] | None = None  # what keeps xgrammar's thread busy past its time
        self._lock = Lock()
        self._xgrammar: _Xgrammar | None = None
        self._guidance: _Guidance | None = None

    def compile(self, spec: GrammarSpec) -> Future[Compiled]:
        """Begin to compile, or find what was compiled before. The future raises RequestError for a bad one."""
        future = self._compiled.get(spec)
        if future is None or (future.done() and future.exception() is not None):
            future = self._compiled[spec] = self._threads.submit(self._compile, spec)
        self._compiled.move_to_end(spec)
        while len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)
        return future

    def allowed(self, key: Hashable, spec: GrammarSpec, output_ids: Sequence[int]) -> torch.Tensor:
        """[vocab] bool: the tokens that may follow ``output_ids``.

        Args:
            key: the same for all calls of one answer.
        Raises:
            RequestError: the outputs do not follow the grammar, or it became too much for the library.
        """
        place = self._places.pop(key, None)
        if place is None or place.seen != list(output_ids[: len(place.seen)]):
            place = _Place(self.compile(spec).result().matcher())
        for token_id in output_ids[len(place.seen) :]:
            if not place.matcher.accept(token_id):
                raise invalid(f"output token {len(place.seen)} ({token_id}) does not follow the {spec.kind}")
            place.seen.append(token_id)
        started = time.thread_time()
        try:
            bits = place.matcher.bitmask()
        except (ValueError, RuntimeError) as exc:
            raise invalid(f"the {spec.kind} became too much to follow: {one_line(str(exc))}") from None
        if time.thread_time() - started > MASK_LIMIT_S:
            raise invalid(f"the {spec.kind} became too much to follow: a token took more than {MASK_LIMIT_S} s of CPU")
        self._places[key] = place
        while len(self._places) > MAX_MATCHERS:
            self._places.popitem(last=False)
        return torch.from_numpy(np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_))

    def settle(self) -> None:
        """Wait until all that was asked for is compiled, or refused."""
        wait(list(self._compiled.values()))

    def close(self) -> None:
        """Threads end with what they compile now."""
        for threads in (self._threads, self._xgrammar_thread):
            threads.shutdown(wait=False, cancel_futures=True)

    def _compile(self, spec: GrammarSpec) -> Compiled:
        try:
            check(spec)
            compiled = self._by_any(spec)
            is_dead = not compiled.matcher().bitmask().any()
        except RequestError:
            raise
        except (ValueError, RuntimeError, RecursionError) as exc:
            raise invalid(f"the {spec.kind} cannot be used: {one_line(str(exc))}") from None
        if is_dead:
            raise invalid(f"the {spec.kind} cannot be used: no text follows it")
        return compiled

    def _by_any(self, spec: GrammarSpec) -> Compiled:
        """Raises ValueError or RuntimeError where no library can."""
        found = self._by_xgrammar(spec) if fits_xgrammar(spec) else None
        if found is not None:
            return found
        guidance: _Guidance = self._library("_guidance", _Guidance)
        return guidance.compile(spec)

    def _by_xgrammar(self, spec: GrammarSpec) -> Compiled | None:
        """None: llguidance is to try. Raises RuntimeError for broken EBNF, which the other may misread."""
        if self._late is not None and not self._late.done():
            return None
        library: _Xgrammar = self._library("_xgrammar", _Xgrammar)
        future: Future[Compiled] = self._xgrammar_thread.submit(library.compile, spec)
        try:
            return future.result(XGRAMMAR_LIMIT_S)
        except TimeoutError:
            if not future.cancel():
                self._late = future
            return None
        except RuntimeError:
            if spec.kind == "grammar":
                raise
            return None

    def _library(self, name: str, make: Any) -> Any:
        with self._lock:
            if getattr(self, name) is None:
                setattr(self, name, make(*self.vocabulary))
        return getattr(self, name)
