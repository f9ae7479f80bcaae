"""`UnsupportedFields`: fields of OpenAI's and vLLM's APIs that change nothing here, or that cannot be honoured."""

from typing import Any

from sharp.serving.api.errors import FieldError
from sharp.serving.api.sampling_fields import StrictMessage

# What they mean there does not change what a completion of this server is.
NO_EFFECT = (
    *("user", "store", "service_tier", "safety_identifier", "prompt_cache_key"),  # OpenAI's servers
    *("verbosity", "prediction", "best_of", "length_penalty", "early_stopping", "spaces_between_special_tokens"),
    *("include_reasoning", "thinking_token_budget", "session_id", "stream_interval"),
    *("kv_transfer_params", "ec_transfer_params"),
    *("vllm_xargs", "guided_decoding_backend", "mm_processor_kwargs", "media_io_kwargs", "watermarking"),
    *("moderation", "prompt_cache_options", "prompt_cache_retention"),  # OpenAI's servers
    *("return_mm_kwargs", "routed_experts_prompt_start"),
)
# Those that every client sends, or that mean something to a service and nothing to a model: the log does not name them.
SILENT = frozenset(
    (
        *("user", "store", "service_tier", "safety_identifier", "session_id"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    )
)
# The values that ask for nothing, and why no other is honoured.
UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "functions": ((None, []), "functions is OpenAI's older form of tools and is not supported here; use tools"),
    "function_call": ((None, "none", "auto"), "function_call is not supported here; use tools and tool_choice"),
    "use_beam_search": ((None, False), "use_beam_search is true; beam search is not supported here"),
    "prompt_logprobs": ((None,), "prompt_logprobs is set; over HTTP use echo and logprobs of /v1/completions"),
    "logprob_token_ids": ((None, []), "logprob_token_ids is set; use top_logprobs, or logit_bias to compare tokens"),
    "prompt_embeds": ((None,), "prompt_embeds is set; a prompt is text or token ids here"),
    "logits_processors": ((None, []), "logits_processors is set; code of clients is not run here"),
    "chat_template": ((None,), "chat_template is set; a template of a request is not run here, use --chat-template"),
    "audio": ((None,), "audio is set; only text is supported"),
    "web_search_options": ((None,), "web_search_options is set; this server searches nothing"),
    "return_prompt_text": (
        (None, False),
        "return_prompt_text is true; echo of /v1/completions returns the prompt",
    ),
    "return_token_offsets": (
        (None, False),
        "return_token_offsets is true; logprobs of /v1/completions has text_offset of every token",
    ),
    "repetition_detection": ((None,), "repetition_detection is set; use repetition_penalty or max_tokens"),
}


class UnsupportedFields(StrictMessage):
    """The fields of the two tables above, of any type."""

    user: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    verbosity: Any = None
    prediction: Any = None
    best_of: Any = None
    length_penalty: Any = None
    early_stopping: Any = None
    spaces_between_special_tokens: Any = None
    include_reasoning: Any = None
    thinking_token_budget: Any = None
    session_id: Any = None
    stream_interval: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    vllm_xargs: Any = None
    guided_decoding_backend: Any = None
    mm_processor_kwargs: Any = None
    media_io_kwargs: Any = None
    watermarking: Any = None
    moderation: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    return_mm_kwargs: Any = None
    routed_experts_prompt_start: Any = None
    functions: Any = None
    function_call: Any = None
    use_beam_search: Any = None
    prompt_logprobs: Any = None
    logprob_token_ids: Any = None
    prompt_embeds: Any = None
    logits_processors: Any = None
    chat_template: Any = None
    audio: Any = None
    web_search_options: Any = None
    return_prompt_text: Any = None
    return_token_offsets: Any = None
    repetition_detection: Any = None

    def check_supported(self) -> None:
        """Refuse what cannot be honoured and would change the completion.

        Raises:
            FieldError: which field, and what to use in its place.
        """
        for name, (accepted, sentence) in UNSUPPORTED.items():
            if getattr(self, name) not in accepted:
                raise FieldError(name, sentence)

    @property
    def without_effect(self) -> list[str]:
        """The fields that are set and change nothing, for the log."""
        return [name for name in NO_EFFECT if name not in SILENT and getattr(self, name, None) is not None]
