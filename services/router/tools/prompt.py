"""How a prompt tells of tools: by the template's own words, or, where it has none, by a system message of ours.

Templates that read `tools` in a format whose calls we find in the answer get them. All others get Hermes' instructions
(Source: NousResearch, Hermes-Function-Calling), and calls and results of earlier turns as text in the same format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from services.router.tools.parsers import HERMES, LLAMA3_JSON, MARKERS, MISTRAL

AUTO = "auto"
INSTRUCTIONS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def format_of(template: str, setting: str) -> str:
    """The format in which this template's model calls; empty: not known. ``setting``: model.tool_parser."""
    if setting != AUTO:
        return setting
    if MARKERS[MISTRAL][0] in template:
        return MISTRAL
    if MARKERS[HERMES][0] in template and "<function=" not in template:
        return HERMES
    if '"parameters"' in template and ("<|python_tag|>" in template or "ipython" in template):
        return LLAMA3_JSON
    return ""


def with_instructions(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Messages for a template that knows no tools: ``tools``, not none of them, and calls and results as text."""
    plain = [_plain(message) for message in messages]
    told = INSTRUCTIONS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if plain[0]["role"] in ("system", "developer"):
        told = f"{plain[0]['content']}\n\n{told}"
        return [{**plain[0], "content": told}, *plain[1:]]
    return [{"role": "system", "content": told}, *plain]


def _plain(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Calls and their results as text."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = [f"<tool_call>\n{json.dumps(c['function'], ensure_ascii=False)}\n</tool_call>" for c in calls]
    text = "\n".join([message["content"], *written] if message["content"] else written)
    return {key: text if key == "content" else value for key, value in message.items() if key != "tool_calls"}
