"""Fields of other servers' APIs that change nothing here or cannot be honoured: a table for each kind of request."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sharp.serving.api.errors import FieldError

MOST_SHOWN = 80  # characters of a value in a message


NULL, FALSE, TRUE = (None,), (None, False), (None, True)
EMPTY: tuple[Any, ...] = (None, [])


@dataclass(frozen=True)
class ForeignField:
    """A field of another server's API.

    Attributes:
        refusal: the message for every value but the harmless ones, with {value} or {json} for the value; empty if no
            value changes a response of this server.
        harmless: the values that ask for nothing.
        logged: whether the log says that the field has no effect.
    """

    refusal: str = ""
    harmless: tuple[Any, ...] = NULL
    logged: bool = False


ForeignFields = Mapping[str, ForeignField]


def check_foreign(table: ForeignFields, fields: Mapping[str, Any]) -> list[str]:
    """Check the fields of a request that are in a table, and return the names that the log should have.

    Raises:
        FieldError: a field cannot be honoured; the message says what to use in its place.
    """
    logged = []
    for name, foreign in table.items():
        value = fields.get(name)
        if foreign.refusal and value not in foreign.harmless:
            raise FieldError(name, foreign.refusal.format(value=value, json=json.dumps(value)[:MOST_SHOWN]))
        if foreign.logged and value is not None:
            logged.append(name)
    return logged


def _no_effect(*names: str, logged: bool = True) -> dict[str, ForeignField]:
    """Return the fields of these names as accepted without effect; `logged` says whether their use is logged."""
    return {name: ForeignField(logged=logged) for name in names}


# OpenAI's and vLLM's fields of completions and conversations. The log leaves out those that every client sends, or that
# concern a service and not a model.
OF_OPENAI = {
    **_no_effect("user", "store", "service_tier", "safety_identifier", "session_id", logged=False),
    **_no_effect("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", logged=False),
    **_no_effect("verbosity", "prediction", "best_of", "length_penalty", "early_stopping", "moderation"),
    **_no_effect("spaces_between_special_tokens", "include_reasoning", "thinking_token_budget"),
    **_no_effect("stream_interval", "kv_transfer_params", "ec_transfer_params", "vllm_xargs", "watermarking"),
    **_no_effect("guided_decoding_backend", "mm_processor_kwargs", "media_io_kwargs", "return_mm_kwargs"),
    **_no_effect("routed_experts_prompt_start"),
    "functions": ForeignField("functions is OpenAI's older form of tools and is not supported here; use tools", EMPTY),
    "function_call": ForeignField(
        "function_call is not supported here; use tools and tool_choice", (None, "none", "auto")
    ),
    "use_beam_search": ForeignField("use_beam_search is true; beam search is not supported here", FALSE),
    "prompt_logprobs": ForeignField("prompt_logprobs is set; over HTTP use echo and logprobs of /v1/completions"),
    "logprob_token_ids": ForeignField(
        "logprob_token_ids is set; use top_logprobs, or logit_bias to compare tokens", EMPTY
    ),
    "prompt_embeds": ForeignField("prompt_embeds is set; a prompt is text or token ids here"),
    "logits_processors": ForeignField("logits_processors is set; code of clients is not run here", EMPTY),
    "chat_template": ForeignField("chat_template is set; a template of a request is not run here, use --chat-template"),
    "audio": ForeignField("audio is set; only text is supported"),
    "web_search_options": ForeignField("web_search_options is set; this server searches nothing"),
    "return_prompt_text": ForeignField("return_prompt_text is true; echo of /v1/completions returns the prompt", FALSE),
    "return_token_offsets": ForeignField(
        "return_token_offsets is true; logprobs of /v1/completions has text_offset of every token", FALSE
    ),
    "repetition_detection": ForeignField("repetition_detection is set; use repetition_penalty or max_tokens"),
}
OF_COMPLETIONS = {**OF_OPENAI, **_no_effect("metadata", logged=False)}
OF_CHATS = {
    **OF_COMPLETIONS,
    "modalities": ForeignField('modalities is {json}; only ["text"] is supported', (None, ["text"])),
}

KEEPS_NOTHING = "this server keeps no responses; send the whole conversation in input"
EARLIER = ("previous_response_id", "conversation", "prompt", "previous_response", "previous_input_messages")
OF_RESPONSES = {
    **_no_effect("stream_options", "include", "top_logprobs", "max_tool_calls", "store", logged=False),
    **_no_effect("service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_options", logged=False),
    **_no_effect("prompt_cache_retention", "access_programs", "background_options", logged=False),
    **_no_effect("vllm_xargs", "kv_transfer_params", "ec_transfer_params", "moderation", "mm_processor_kwargs"),
    **{name: ForeignField(f"{name} is set; {KEEPS_NOTHING}") for name in EARLIER},
    "background": ForeignField(f"background is true; {KEEPS_NOTHING}, and wait for its response", FALSE),
    "context_management": ForeignField(
        "context_management is set; a conversation is not compacted here, use truncation", EMPTY
    ),
    "enable_response_messages": ForeignField(
        "enable_response_messages is true; a response has no messages here; use /v1/chat/completions", FALSE
    ),
    "image": ForeignField("image is set; only text is supported"),
}
OF_MESSAGES = _no_effect(
    *("metadata", "thinking", "service_tier", "container", "mcp_servers", "context_management", "cache_control"),
    *("diagnostics", "inference_geo", "speed", "user_profile_id", "workspace_id"),
    logged=False,
)
OF_ENCODERS = {
    **_no_effect("user", logged=False),
    **_no_effect("priority", "cache_salt", "mm_processor_kwargs"),
}
OF_TOKENIZERS = {
    **_no_effect("media_io_kwargs", "mm_processor_kwargs", logged=False),
    "chat_template": OF_OPENAI["chat_template"],
}

# Clients of KServe's protocol may send texts. No output of this protocol depends on the fields without effect.
FALSE_TEXTS, TRUE_TEXTS = (*FALSE, "false", "False", "0"), (*TRUE, "true", "True", "1")
OF_KSERVE = {
    **OF_OPENAI,
    **_no_effect("logprobs", "flat_logprobs", "output_kind", "skip_clone", "skip_reading_prefix_cache", "extra_args"),
    "use_beam_search": ForeignField(OF_OPENAI["use_beam_search"].refusal, FALSE_TEXTS),
    "return_logprobs": ForeignField("return_logprobs is true; there is return_cumulative_logprob only", FALSE_TEXTS),
    "detokenize": ForeignField("detokenize is {json}; text_output is a text", TRUE_TEXTS),
    "lora_name": ForeignField("lora_name is {value!r:.40}; this server has no adapters", (None, "")),
}
