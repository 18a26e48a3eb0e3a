"""Endpoints that need a model's hidden states, which the engine does not give out yet: the request is checked, then
refused with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from services.protocol.errors import ErrorCode, RequestError, invalid
from services.router.fields import Fields
from services.router.front import Front
from services.router.validate import check_model

MAX_TEXTS = 2048


def embed(front: Front, body: Mapping[str, Any]) -> NoReturn:
    """POST /v1/embeddings.

    Raises:
        RequestError: always; 400, or 404 for another model.
    """
    fields = Fields(body)
    check_model(fields, front.model)
    _check_texts(fields, "input")
    raise no_states(front, "embeddings", "input")


def score(front: Front, body: Mapping[str, Any]) -> NoReturn:
    """POST /score and /v1/score.

    Raises:
        RequestError: always; 400, or 404 for another model.
    """
    fields = Fields(body)
    check_model(fields, front.model)
    for key in ("text_1", "text_2"):
        _check_texts(fields, key)
    raise no_states(front, "scores", None)


def _check_texts(fields: Fields, key: str) -> None:
    value = fields.raw(key)
    if isinstance(value, str):
        return
    if not fields.items(key, max_items=MAX_TEXTS):
        raise invalid(f"{key} is missing: give text or a list of texts", key)


def no_states(front: Front, what: str, param: str | None) -> RequestError:
    """Why there are none, over whichever front they were asked for."""
    return RequestError(
        ErrorCode.NOT_YET_SUPPORTED,
        f"{front.model!r} gives no {what}: its architecture, {front.core.card.architecture}, generates text, and the "
        "engine does not give out hidden states yet",
        param=param,
    )
