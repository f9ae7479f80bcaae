"""The request of OpenAI's Responses API, as one of `/v1/chat/completions`."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, PrivateAttr

from sharp.serving.api.errors import ContextLengthError, FieldError
from sharp.serving.api.request import Prompt
from sharp.serving.api.sampling_fields import NULL_IS_UNSET, Flag, Number, StrictMessage, WholeNumber, one_of
from sharp.serving.frontends.http.chat_request import ChatRequest, ConvertedRequest
from sharp.serving.frontends.http.endpoint import Endpoint
from sharp.serving.frontends.http.openai_response import ResponseBuilder
from sharp.serving.frontends.http.responses_response import ResponsesResponse

TEXTS = ("input_text", "output_text", "text")
KEEPS_NOTHING = "this server keeps no responses; send the whole conversation in input"
EARLIER = ("previous_response_id", "conversation", "prompt", "previous_response", "previous_input_messages")
# vLLM's fields of a response that a conversation has, too: checked there, under the same names.
OF_CHAT = (
    *("min_p", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "logit_bias", "include_stop_str_in_output"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "skip_special_tokens", "structured_outputs"),
    *("request_id", "vllm_xargs", "kv_transfer_params", "ec_transfer_params", "moderation", "prompt_cache_options"),
    "mm_processor_kwargs",
)
NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens"}


class TextFormat(StrictMessage):
    """The format of the text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = None
    strict: bool | None = None

    model_config = ConfigDict(alias_generator=lambda name: name.rstrip("_"))


class TextConfig(StrictMessage):
    """How the text is written."""

    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(StrictMessage):
    """How much is thought."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(ConvertedRequest):
    """The body of `/v1/responses`."""

    input: Annotated[str | list[dict[str, Any]], one_of("a text or a list of items")]
    model: Annotated[str, NULL_IS_UNSET] = ""
    instructions: str | None = None
    max_output_tokens: WholeNumber | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: WholeNumber | None = None
    seed: WholeNumber | None = None
    stream: Flag = False
    stream_options: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: Flag = True
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    metadata: dict[str, Any] | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: list[str] | None = None
    top_logprobs: WholeNumber | None = None
    max_tool_calls: WholeNumber | None = None
    store: bool | None = None
    service_tier: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    priority: Annotated[WholeNumber, NULL_IS_UNSET] = 0
    cache_salt: Annotated[str, NULL_IS_UNSET] = ""
    chat_template_kwargs: dict[str, Any] | None = None
    min_p: Any = None
    min_tokens: Any = None
    stop: Any = None
    stop_token_ids: Any = None
    ignore_eos: Any = None
    logit_bias: Any = None
    include_stop_str_in_output: Any = None
    repetition_penalty: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    skip_special_tokens: Any = None
    structured_outputs: Any = None
    request_id: Any = None
    vllm_xargs: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    moderation: Any = None
    prompt_cache_options: Any = None
    access_programs: Any = None
    background_options: Any = None
    context_management: Any = None
    image: Any = None
    previous_response: Any = None
    previous_input_messages: Any = None
    enable_response_messages: Flag = False
    mm_processor_kwargs: Any = None

    def generation(self) -> ChatRequest:
        """See `ConvertedRequest`."""
        for name in EARLIER:
            if getattr(self, name) is not None:
                raise FieldError(name, f"{name} is set; {KEEPS_NOTHING}")
        if self.background:
            raise FieldError("background", f"background is true; {KEEPS_NOTHING}, and wait for its response")
        if self.context_management not in (None, []):
            message = "context_management is set; a conversation is not compacted here, use truncation"
            raise FieldError("context_management", message)
        if self.enable_response_messages:
            message = "enable_response_messages is true; a response has no messages here; use /v1/chat/completions"
            raise FieldError("enable_response_messages", message)
        if self.image is not None:
            raise FieldError("image", "image is set; only text is supported")
        body: dict[str, Any] = {
            "model": self.model,
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            "parallel_tool_calls": self.parallel_tool_calls,
            "tools": [_tool(tool) for tool in self.tools or ()] or None,
            "tool_choice": _choice(self.tool_choice) if self.tools else None,
            "response_format": self._format(),
            "reasoning_effort": self.reasoning and self.reasoning.effort,
            "truncate_prompt_tokens": -1 if self.truncation == "auto" else None,
        }
        same = ("temperature", "top_p", "top_k", "seed", "stream", "priority", "cache_salt", "chat_template_kwargs")
        body |= {name: getattr(self, name) for name in same}
        body |= {name: getattr(self, name) for name in OF_CHAT if getattr(self, name) is not None}
        request = _ResponsesChat.model_validate_json(json.dumps(body))  # keys of logit_bias are texts only in JSON
        request.of(self)
        return request

    def _messages(self) -> list[dict[str, Any]]:
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        for number, item in enumerate(items):
            _add_item(messages, item, f"input.{number}")
        return messages

    def _format(self) -> dict[str, Any] | None:
        form = None if self.text is None else self.text.format
        if form is None or form.type == "text":
            return None
        schema = {"json_schema": {"name": form.name, "schema": form.schema_}} if form.type == "json_schema" else {}
        return {"type": form.type, **schema}


class _ResponsesChat(ChatRequest):
    """A conversation whose response is of the Responses API."""

    _request: ResponsesRequest | None = PrivateAttr(None)

    def of(self, request: ResponsesRequest) -> None:
        """Say what it was made of."""
        self._request = request

    def response(
        self, endpoint: Endpoint, request_id: str, prompts: Sequence[Prompt], computed: Sequence[Sequence[int]]
    ) -> ResponseBuilder:
        """See `GenerationRequest`."""
        prompt = str(prompts[0])
        settings = {} if self._request is None else self._request.model_dump(by_alias=True, exclude={"input", *OF_CHAT})
        return ResponsesResponse(
            request_id, endpoint.name, endpoint.texts, lambda: self.message_parser(prompt), len(computed[0]), settings
        )

    def renamed(self, error: FieldError) -> FieldError:
        """See `GenerationRequest`."""
        error = super().renamed(error)
        name = NAMES.get(error.field, error.field)
        if isinstance(error, ContextLengthError):
            return ContextLengthError(name, str(error), error.limit, error.tokens, error.needed)
        name = "text.format" if name == "response_format" else name
        return error if name == error.field else FieldError(name, str(error).replace(error.field, name, 1))


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any], place: str) -> None:
    """Add an item of the input to the messages of a conversation."""
    kind = item.get("type", "message")
    try:
        if kind == "message":
            role = "system" if item["role"] == "developer" else item["role"]
            if not isinstance(role, str):
                raise FieldError("input", f"{place}.role must be a text")
            messages.append({"role": role, "content": _text(item["content"], place)})
        elif kind == "function_call":
            function = {"name": item["name"], "arguments": item.get("arguments") or "{}"}
            call = {"id": item.get("call_id") or item.get("id"), "type": "function", "function": function}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = item["output"] if isinstance(item["output"], str) else _text(item["output"], place)
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        elif kind != "reasoning":  # what was thought is no part of a conversation
            raise FieldError("input", f"{place} is of type {kind!r:.40}, which is not supported here")
    except KeyError as error:
        raise FieldError("input", f"{place} has no {error}") from error


def _text(content: Any, place: str) -> str:
    """The text of an item."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else ():
        if not isinstance(part, dict) or part.get("type") not in TEXTS or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise FieldError("input", f"{place} has a part of type {kind!r:.40}; only text is supported")
        texts.append(part["text"])
    return "".join(texts)


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool, whose function is beside its type here."""
    if tool.get("type") != "function":
        raise FieldError("tools", f"tools has one of type {tool.get('type')!r:.40}; only functions are supported")
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _choice(choice: str | dict[str, Any] | None) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function":
        raise FieldError("tool_choice", f"tool_choice is {json.dumps(choice)[:80]}; only functions are supported")
    return {"type": "function", "function": {"name": choice.get("name", "")}}
