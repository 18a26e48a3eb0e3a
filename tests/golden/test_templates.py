"""Chat templates and token ids against transformers, which the router itself never imports."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from services.protocol.errors import RequestError
from services.protocol.model_card import ModelCard
from services.router.template import ChatTemplate
from services.router.text import Text, context_tokens
from tests.fronts import SPECIAL, make_card, tokenizer

CHATML = """{% for message in messages %}
    {%- if loop.first and message['role'] != 'system' %}
<|im_start|>system
You are a helpful assistant.<|im_end|>
    {% endif %}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

ALTERNATING = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] | trim + ' [/INST]' }}
{%- else %}{{ message['content'] + eos_token }}{% endif %}
{% endfor %}"""

DATED = """{%- set ns = namespace(system='', seen=false) %}
{%- for m in messages if m.role == 'system' %}{% set ns.system = ns.system ~ m.content %}{% endfor %}
{{- bos_token }}<|system|>Today is {{ strftime_now('%d %b %Y') }}. {{ ns.system -}}
{%- for m in messages -%}
    {%- if m.role == 'system' %}{% continue %}{% endif -%}
    <|{{ m.role }}|>{% if m.name is defined %}({{ m.name }}) {% endif %}{{ m.content | trim }}
    {%- if loop.index > 6 %}{% break %}{% endif -%}
{%- endfor %}
{%- if tools %}tools!{% endif %}{% if documents is not none %}documents!{% endif %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

TOOLS = """{% for m in messages %}<|im_start|>{{ m.role }}{% generation %}
{% if m.tool_calls %}{% for call in m.tool_calls -%}
<call>{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</call>
{{ call.function.arguments | tojson(indent=2, sort_keys=true) }}
{% endfor %}{% endif %}
{{ m.content or '' }}{% if m.tool_call_id %} ({{ m.tool_call_id }}){% endif %}{% endgeneration %}<|im_end|>
{% endfor %}"""

TEMPLATES = {"chatml": CHATML, "alternating": ALTERNATING, "dated": DATED, "tools": TOOLS}

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"b": "é<&>'", "a": [1, None, True]}}}
USER = {"role": "user", "content": "  Hi <b>there</b> & 안녕 \n"}
CHATS: dict[str, list[dict[str, Any]]] = {
    "user": [USER],
    "system": [{"role": "system", "content": "Be brief."}, USER],
    "turns": [USER, {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "{{ 7 * 7 }} {% raw %}"}],
    "two users": [USER, {"role": "user", "content": "x", "name": "ann"}],
    "tools": [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
    ],
    "long": [{"role": "user" if i % 2 == 0 else "assistant", "content": f"m{i}"} for i in range(9)],
}


@pytest.fixture(scope="module")
def oracle() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer(), bos_token=SPECIAL[1], eos_token=SPECIAL[2])


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize(
    "template", [CHATML, ALTERNATING, DATED, TOOLS], ids=["chatml", "alternating", "dated", "tools"]
)
def test_a_rendered_chat_equals_transformers(oracle: Any, template: str, chat: str) -> None:
    ours = ChatTemplate(template, {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2]}, lambda: datetime.now())
    for add_generation_prompt in (True, False):
        try:
            expected = oracle.apply_chat_template(
                CHATS[chat], chat_template=template, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except jinja2.TemplateError as exc:
            with pytest.raises(RequestError, match=re.escape(str(exc))):
                ours.render(CHATS[chat], add_generation_prompt=add_generation_prompt)
            continue
        assert ours.render(CHATS[chat], add_generation_prompt=add_generation_prompt) == expected


async def test_chat_ids_equal_transformers(oracle: Any, tmp_path: Path) -> None:
    text = Text(make_card(tmp_path, chat_template=CHATML), context=256)
    for messages in (CHATS["user"], CHATS["system"], CHATS["turns"], CHATS["two users"]):
        expected = oracle.apply_chat_template(messages, chat_template=CHATML, add_generation_prompt=True)
        assert await text.encode_chat(messages) == tuple(expected["input_ids"])
    text.close()


class TestDefaultModel:
    """The template and the tokenizer of the model that pdray serves by default."""

    async def test_its_chats_and_prompts_equal_transformers(self, default_model_folder: Path) -> None:
        card = ModelCard.load(default_model_folder)
        oracle = AutoTokenizer.from_pretrained(str(default_model_folder))
        text = Text(card, context=context_tokens(card, 0))
        for name in ("user", "system", "turns", "two users", "long"):
            expected = oracle.apply_chat_template(CHATS[name], add_generation_prompt=True)["input_ids"]
            assert await text.encode_chat(CHATS[name]) == tuple(expected)
        for prompt in ("Once upon a time", " x", "한국어 👨‍👩‍👧‍👦", "a\n\n b\t", "<|im_start|>user"):
            assert await text.encode_prompt(prompt) == tuple(oracle(prompt)["input_ids"])
            ids = oracle(prompt)["input_ids"]
            assert await text.decode(ids) == oracle.decode(ids, skip_special_tokens=True)
        text.close()
