"""Typed reading of one JSON object of a request: each error names the field, its value and what it may be.

``null`` always means absent. What was never asked for is left in `unread`, so that the front can name it in a warning.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from services.protocol.errors import ErrorCode, RequestError, invalid

SHOWN_CHARS = 60


def shown(value: Any) -> str:
    """A value as an error message may show it: short, and valid UTF-8 whatever it holds."""
    text = repr(value) if not isinstance(value, dict | list) else f"{type(value).__name__} of {len(value)}"
    text = text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "…"
    return text.encode("utf-8", "replace").decode()


def not_yet(what: str, param: str) -> RequestError:
    """The refusal of a legal request that this server cannot do yet; never silently ignored."""
    return RequestError(ErrorCode.NOT_YET_SUPPORTED, f"{what} is not supported yet", param=param)


class Fields:
    """One JSON object, read by name. ``path`` stands before each name in errors, e.g. ``messages[0]``."""

    def __init__(self, data: Mapping[str, Any], path: str = "") -> None:
        self._data = data
        self._path = path
        self._read: set[str] = set()

    def name(self, key: str) -> str:
        return f"{self._path}.{key}" if self._path else key

    def raw(self, key: str) -> Any:
        """The value as it came, None where absent."""
        self._read.add(key)
        return self._data.get(key)

    def unread(self) -> tuple[str, ...]:
        """Keys nobody asked for, in the order they came."""
        return tuple(key for key in self._data if key not in self._read)

    def text(self, key: str, *, max_chars: int | None = None) -> str | None:
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, str):
            raise invalid(f"{self.name(key)} must be text, got {shown(value)}", self.name(key))
        if max_chars is not None and len(value) > max_chars:
            raise invalid(
                f"{self.name(key)} has {len(value)} characters, at most {max_chars} are allowed", self.name(key)
            )
        return value

    def flag(self, key: str) -> bool | None:
        value = self.raw(key)
        if value is None or isinstance(value, bool):
            return value
        raise invalid(f"{self.name(key)} must be true or false, got {shown(value)}", self.name(key))

    def integer(self, key: str, low: int, high: int) -> int | None:
        """A whole number in low..high; 5.0 is 5, as JSON does not tell them apart."""
        value = self.raw(key)
        if value is None:
            return None
        number = whole(value)
        if number is None:
            raise invalid(f"{self.name(key)} must be a whole number, got {shown(value)}", self.name(key))
        if not low <= number <= high:
            raise invalid(f"{self.name(key)} must be {_range(low, high)}, got {shown(number)}", self.name(key))
        return number

    def number(self, key: str, low: float, high: float, *, above_low: bool = False) -> float | None:
        """A finite number in low..high; ``above_low``: low itself is refused."""
        value = self.raw(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise invalid(f"{self.name(key)} must be a number, got {shown(value)}", self.name(key))
        if not (low <= value <= high) or not math.isfinite(value) or (above_low and value == low):
            bound = f"above {low:g} and at most {high:g}" if above_low else f"from {low:g} to {high:g}"
            raise invalid(f"{self.name(key)} must be {bound}, got {shown(value)}", self.name(key))
        return float(value)

    def items(self, key: str, *, max_items: int) -> list[Any] | None:
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, list):
            raise invalid(f"{self.name(key)} must be a list, got {shown(value)}", self.name(key))
        if len(value) > max_items:
            raise invalid(f"{self.name(key)} has {len(value)} items, at most {max_items} are allowed", self.name(key))
        return value

    def object(self, key: str) -> Mapping[str, Any] | None:
        value = self.raw(key)
        if value is None or isinstance(value, dict):
            return value
        raise invalid(f"{self.name(key)} must be an object, got {shown(value)}", self.name(key))

    def only(self, key: str, neutral: Iterable[Any], what: str) -> None:
        """Refuse every value of a feature that is not there yet, but absent and those that ask for nothing.

        Raises:
            RequestError: NOT_YET_SUPPORTED, naming the field.
        """
        if not self._is_neutral(key, neutral):
            raise not_yet(what, self.name(key))

    def never(self, key: str, neutral: Iterable[Any], why: str) -> None:
        """The same for what will not come. Raises RequestError INVALID_REQUEST with the reason."""
        if not self._is_neutral(key, neutral):
            raise invalid(f"{self.name(key)} cannot be given: {why}", self.name(key))

    def _is_neutral(self, key: str, neutral: Iterable[Any]) -> bool:
        value = self.raw(key)
        return value is None or any(type(value) is type(n) and value == n for n in neutral)


def whole(value: Any) -> int | None:
    """The integer that a JSON number is, or None. Booleans are none."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    return int(value) if isinstance(value, float) and value.is_integer() else None


def _range(low: int, high: int) -> str:
    return f"at least {low}" if high >= 2**31 - 1 > low else f"from {low} to {high}"
