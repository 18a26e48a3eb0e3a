"""Prompts as ids and back, computing nothing: /tokenize and /detokenize in vLLM's shapes, and Anthropic's count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.protocol.errors import invalid
from services.router.api.claude_ask import tokens_ask_part
from services.router.extras import read_extras
from services.router.fields import Fields
from services.router.front import Front
from services.router.messages import read_messages
from services.router.template import ChatOptions
from services.router.tools.spec import read_tools
from services.router.validate import check_model, token_ids


async def tokenize(front: Front, body: Mapping[str, Any]) -> dict[str, Any]:
    """POST /tokenize: of ``prompt``, or of ``messages`` as a chat would have it.

    Raises:
        RequestError: 400 or 404; ``param`` names the field at fault.
    """
    fields = Fields(body)
    check_model(fields, front.model)
    prompt = fields.text("prompt")
    is_chat = fields.raw("messages") is not None
    if (prompt is not None) == is_chat:
        raise invalid("give either prompt or messages", "messages" if is_chat else "prompt")
    with_names = bool(fields.flag("return_token_strs"))
    if prompt is None:
        messages, tools, extras = read_messages(fields), read_tools(fields), read_extras(fields, is_chat=True)
        options = ChatOptions(
            tools=tools.offered, add_generation_prompt=extras.add_generation_prompt, variables=extras.variables
        )
        ids = await front.text.encode_chat(messages, options)
    else:
        ids = await front.text.encode_prompt(prompt, bare=fields.flag("add_special_tokens") is False)
    names = [front.text.token_name(token_id) for token_id in ids] if with_names else None
    return {"count": len(ids), "max_model_len": front.text.context, "tokens": list(ids), "token_strs": names}


async def detokenize(front: Front, body: Mapping[str, Any]) -> dict[str, Any]:
    """POST /detokenize: the text of ``tokens``, special ones left out.

    Raises:
        RequestError: 400 or 404; ``param`` names the field at fault.
    """
    fields = Fields(body)
    check_model(fields, front.model)
    items = fields.items("tokens", max_items=front.text.context)
    if items is None:
        raise invalid("tokens is missing", "tokens")
    return {"prompt": await front.text.decode(token_ids(items, front.text.vocab_size, "tokens"))}


async def count_tokens(front: Front, body: Mapping[str, Any]) -> dict[str, Any]:
    """POST /v1/messages/count_tokens. Raises RequestError."""
    ask = tokens_ask_part(Fields(body), front.model)
    return {"input_tokens": len(await front.text.encode_chat(ask.messages, ask.chat_options))}
