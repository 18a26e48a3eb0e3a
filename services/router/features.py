"""Fields of the OpenAI API, and of its common extensions, that this server does not act on.

A feature that is not there yet is refused, never ignored: an answer without it would be a wrong one.
"""

from __future__ import annotations

from typing import Any

KNOWN_WITHOUT_EFFECT = (
    "include_reasoning",
    "moderation",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "request_id",
    "safety_identifier",
    "service_tier",
    "spaces_between_special_tokens",
    "store",
    "user",
)
"""Fields that ask nothing of the answer; only their form is checked."""

NOT_THERE: dict[str, tuple[tuple[Any, ...], str]] = {
    "suffix": (("",), "a suffix"),
    "functions": (([],), "calling by functions (use tools)"),
    "function_call": (("none", "auto"), "calling by function_call (use tool_choice)"),
    "modalities": ((["text"],), "an output other than text"),
    "audio": ((), "audio output"),
    "prediction": ((), "predicted output"),
    "web_search_options": ((), "web search"),
    "documents": (([],), "documents for the template"),
    "continue_final_message": ((False,), "going on with the last message"),
    "include_stop_str_in_output": ((False,), "a stop text in the answer"),
    "truncate_prompt_tokens": ((), "cutting the prompt"),
    "use_beam_search": ((False,), "beam search"),
    "length_penalty": ((1, 1.0), "a length_penalty, which only beam search has,"),
    "allowed_token_ids": (([],), "a list of allowed tokens"),
    "bad_words": (([],), "a list of words that never come (logit_bias may serve)"),
    "logits_processors": (([],), "a logits processor of the client"),
    "mm_processor_kwargs": (({},), "a setting for images"),
    "prompt_embeds": ((), "a prompt of embeddings"),
    "return_tokens_as_token_ids": ((False,), "tokens of logprobs as ids (return_token_ids gives the ids)"),
}
"""Field → values that ask for nothing, and what the refusal calls the feature."""

NEVER: dict[str, tuple[tuple[Any, ...], str]] = {
    "chat_template": (
        (),
        "a template of the client is not taken: templates are programs, and only the model's own runs here",
    ),
    "kv_transfer_params": ((), "workers are chosen by the router, which moves KV by itself"),
    "vllm_xargs": (({},), "there are no arguments for parts of vLLM here"),
}
"""The same of what will not come, with the reason."""
