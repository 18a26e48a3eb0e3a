"""Fields of the OpenAI API, and of its common extensions, that this server does not act on.

A feature that is not there yet is refused, never ignored: an answer without it would be a wrong one.
"""

from __future__ import annotations

from typing import Any

KNOWN_WITHOUT_EFFECT = (
    "metadata",
    "moderation",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)
"""Fields of the API that ask nothing of the answer; only their form is checked."""

NOT_THERE: dict[str, tuple[tuple[Any, ...], str]] = {
    "suffix": (("",), "a suffix"),
    "tools": (([],), "calling tools"),
    "tool_choice": (("none", "auto"), "calling tools"),
    "functions": (([],), "calling functions"),
    "function_call": (("none", "auto"), "calling functions"),
    "modalities": ((["text"],), "an output other than text"),
    "audio": ((), "audio output"),
    "prediction": ((), "predicted output"),
    "web_search_options": ((), "web search"),
}
"""Field → values that ask for nothing, and what the refusal calls the feature."""
