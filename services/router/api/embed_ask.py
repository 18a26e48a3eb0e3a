"""What is asked of /v1/embeddings, /score and the RPC Embed, checked: OpenAI's fields, and vLLM's beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.protocol.errors import invalid
from services.router.fields import Fields, not_yet, shown, whole
from services.router.validate import check_model, token_ids

PRIORITIES = (-(2**31), 2**31 - 1)
_NOT_THERE = ("truncate_prompt_tokens", "messages", "embed_dtype", "endianness", "chat_template")
_NO_EFFECT = ("user", "request_id", "mm_processor_kwargs")
Text = str | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedAsk:
    """Texts, or their token ids, in the order in which their vectors are wanted."""

    texts: tuple[Text, ...]
    names: tuple[str, ...]  # of each in error messages
    normalize: bool = True
    is_base64: bool = False
    dimensions: int | None = None
    is_bare: bool = False  # no start token before a text
    priority: int = 0
    slo: Mapping[str, Any] | None = None
    ignored: tuple[str, ...] = ()  # fields that nobody knows


@dataclass(frozen=True, slots=True)
class ScoreAsk:
    """Pairs of texts to be compared, as indexes into the texts."""

    texts: EmbedAsk
    pairs: tuple[tuple[int, int], ...]


def embed_ask(body: Mapping[str, Any], model: str, vocab_size: int) -> EmbedAsk:
    """The body of POST /v1/embeddings.

    Raises:
        RequestError: 400, or 404 for another model; ``param`` names the field at fault.
    """
    fields = Fields(body)
    common = _common(fields, model)
    texts = _input(fields.raw("input"), vocab_size)
    form = fields.text("encoding_format") or "float"
    if form not in ("float", "base64"):
        raise invalid(f"encoding_format must be float or base64, got {shown(form)}", "encoding_format")
    dimensions = fields.integer("dimensions", 1, 2**31 - 1)
    normalize = fields.flag("normalize") is not False
    is_single = isinstance(body.get("input"), str) or _is_ids(body.get("input"))
    return EmbedAsk(
        texts=texts,
        names=("input",) if is_single else tuple(f"input[{i}]" for i in range(len(texts))),
        normalize=normalize,
        is_base64=form == "base64",
        dimensions=dimensions,
        ignored=fields.unread(),
        **common,
    )


def score_ask(body: Mapping[str, Any], model: str) -> ScoreAsk:
    """The body of POST /score: one text against each of several, or as many against as many.

    Raises:
        RequestError: 400, or 404 for another model; ``param`` names the field at fault.
    """
    fields = Fields(body)
    common = _common(fields, model)
    first, second = _texts(fields, "text_1"), _texts(fields, "text_2")
    if len(first) not in (1, len(second)):
        raise invalid(f"text_1 has {len(first)} texts, text_2 has {len(second)}: give one there, or as many", "text_1")
    names = [f"text_1[{i}]" for i in range(len(first))] + [f"text_2[{i}]" for i in range(len(second))]
    pairs = tuple((0 if len(first) == 1 else i, len(first) + i) for i in range(len(second)))
    texts = EmbedAsk(texts=(*first, *second), names=tuple(names), ignored=fields.unread(), **common)
    return ScoreAsk(texts, pairs)


def _common(fields: Fields, model: str) -> dict[str, Any]:
    check_model(fields, model)
    for key in _NOT_THERE:
        if fields.raw(key) is not None:
            raise not_yet(key, key)
    for key in _NO_EFFECT:
        fields.raw(key)
    return {
        "is_bare": fields.flag("add_special_tokens") is False,
        "priority": fields.integer("priority", *PRIORITIES) or 0,
        "slo": fields.object("slo"),
    }


def _input(value: Any, vocab_size: int) -> tuple[Text, ...]:
    """Text, texts, token ids, or lists of token ids."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        got = "nothing" if value is None else shown(value)
        raise invalid(f"input must be text, token ids, or a list of either, got {got}", "input")
    if _is_ids(value):
        return (token_ids(value, vocab_size, "input"),)
    return tuple(_one(item, vocab_size, f"input[{i}]") for i, item in enumerate(value))


def _one(item: Any, vocab_size: int, name: str) -> Text:
    if isinstance(item, str):
        return item
    if not isinstance(item, list) or not item:
        raise invalid(f"{name} must be text or token ids, got {shown(item)}", name)
    return token_ids(item, vocab_size, name)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and whole(value[0]) is not None


def _texts(fields: Fields, key: str) -> Sequence[str]:
    value = fields.raw(key)
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise invalid(f"{key} must be text or a list of texts, got {'nothing' if value is None else shown(value)}", key)
    return texts
