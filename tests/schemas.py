"""Random JSON schemas whose answers are bounded in length."""

from __future__ import annotations

import random
from typing import Any

WORDS = ("name", "age", "city", "tags", "size", "is_new", "größe", "a b", 'say "hi"', "x-1", "notes", "kind")
PATTERNS = ("^[a-z]{2,5}$", "^[A-Z][0-9]{1,3}$", "^(red|green|blue)$")


def random_schema(dice: random.Random, depth: int = 2) -> dict[str, Any]:
    """An object at the top; ``depth``: how many levels of objects and lists may lie in it."""
    names = dice.sample(WORDS, dice.randint(1, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _any(dice, depth) for name in names},
        "required": [name for name in names if dice.random() < 0.7],
    }
    if dice.random() < 0.5:
        schema["additionalProperties"] = False
    if depth == 2 and dice.random() < 0.2:
        schema["$defs"] = {"part": _any(dice, 0)}
        schema["properties"][names[0]] = {"$ref": "#/$defs/part"}
    return schema


def _any(dice: random.Random, depth: int) -> dict[str, Any]:
    makers = [_string, _integer, _number, _enum, _flag]
    if depth:
        makers += [_list, _object, _either, _both]
    return dice.choice(makers)(dice, depth)


def _string(dice: random.Random, depth: int) -> dict[str, Any]:
    if dice.random() < 0.2:
        return {"type": "string", "pattern": dice.choice(PATTERNS)}
    least = dice.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + dice.randint(0, 12)}


def _integer(dice: random.Random, depth: int) -> dict[str, Any]:
    low = dice.randint(-1000, 1000)
    return {"type": "integer", "minimum": low, "maximum": low + dice.randint(0, 500)}


def _number(dice: random.Random, depth: int) -> dict[str, Any]:
    low = dice.randint(-50, 50)
    return {"type": "number", "minimum": low, "exclusiveMaximum": low + dice.randint(1, 90)}


def _enum(dice: random.Random, depth: int) -> dict[str, Any]:
    values = ["red", "a \\ b", "é", 3, -0.5, True, None, ["x", 1], {"k": "v"}]
    return {"enum": dice.sample(values, dice.randint(1, 4))} if dice.random() < 0.8 else {"const": dice.choice(values)}


def _flag(dice: random.Random, depth: int) -> dict[str, Any]:
    return {"type": dice.choice(["boolean", "null", ["boolean", "null"]])}


def _list(dice: random.Random, depth: int) -> dict[str, Any]:
    least = dice.randint(0, 1)
    return {"type": "array", "items": _any(dice, depth - 1), "minItems": least, "maxItems": least + dice.randint(0, 2)}


def _object(dice: random.Random, depth: int) -> dict[str, Any]:
    return random_schema(dice, depth - 1)


def _either(dice: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(dice, depth - 1), _any(dice, 0)]}


def _both(dice: random.Random, depth: int) -> dict[str, Any]:
    return {"allOf": [_integer(dice, 0), {"type": ["integer", "string"]}]}
