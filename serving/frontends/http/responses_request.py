"""The request of OpenAI's Responses API, as one of `/v1/chat/completions`."""

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from sharp.serving.api.errors import FieldError
from sharp.serving.frontends.foreign_fields import OF_RESPONSES
from sharp.serving.frontends.http.chat_request import ChatApi, ChatRequest, Effort
from sharp.serving.frontends.http.conversation import text_parts
from sharp.serving.frontends.http.endpoint import Endpoint
from sharp.serving.frontends.http.openai_request import MAX_REQUEST_ID
from sharp.serving.frontends.http.openai_response import ResponseBuilder
from sharp.serving.frontends.http.responses_response import ResponsesResponse
from sharp.serving.frontends.json_fields import (
    NULL_IS_UNSET,
    Flag,
    LogitBias,
    Number,
    RequestBody,
    StopTexts,
    StrictMessage,
    TokenIds,
    WholeNumber,
    one_of,
)
from sharp.serving.frontends.structured_outputs import ResponseFormat, StructuredOutputs
from sharp.serving.text.chat_forms import MessageParser

# The fields that a request of `/v1/chat/completions` has under the same names.
OF_CHAT = (
    *("model", "temperature", "top_p", "top_k", "seed", "stream", "priority", "cache_salt", "request_id"),
    *("min_p", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "logit_bias", "include_stop_str_in_output"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "skip_special_tokens", "structured_outputs"),
    "parallel_tool_calls",
)
NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}


class TextFormat(StrictMessage):
    """The format that the text of a response must have (`text.format`): free text, JSON, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = None
    strict: bool | None = None

    model_config = ConfigDict(alias_generator=lambda name: name.rstrip("_"))


class TextConfig(StrictMessage):
    """The field `text` of `/v1/responses`: the format that the text must have, and its verbosity."""

    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(StrictMessage):
    """The field `reasoning` of `/v1/responses`: the effort of reasoning, and whether to summarize it."""

    effort: Effort | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(RequestBody):
    """The body of `/v1/responses`."""

    foreign = OF_RESPONSES

    input: Annotated[str | list[dict[str, Any]], one_of("a text or a list of items")]
    model: Annotated[str, NULL_IS_UNSET] = ""
    instructions: str | None = None
    max_output_tokens: WholeNumber | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: WholeNumber | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: LogitBias | None = None
    seed: WholeNumber | None = None
    min_tokens: WholeNumber | None = None
    stop: StopTexts | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    priority: Annotated[WholeNumber, NULL_IS_UNSET] = 0
    cache_salt: Annotated[str, NULL_IS_UNSET] = ""
    structured_outputs: StructuredOutputs | None = None
    stream: Flag = False
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: Flag = True
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    request_id: Annotated[str, NULL_IS_UNSET, Field(max_length=MAX_REQUEST_ID)] = ""

    def generation(self) -> ChatRequest:
        """Return the request as one of `/v1/chat/completions`.

        Raises:
            FieldError: a field cannot be used, or not be honoured.
        """
        conversation = {
            "messages": self._messages(),
            "tools": [_tool(tool) for tool in self.tools or ()] or None,
            "tool_choice": _choice(self.tool_choice) if self.tools else None,
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        fields = {
            "max_completion_tokens": self.max_output_tokens,
            "response_format": self._format(),
            "reasoning_effort": self.reasoning and self.reasoning.effort,
            "truncate_prompt_tokens": -1 if self.truncation == "auto" else None,
        }
        fields |= {name: getattr(self, name) for name in OF_CHAT}
        return ChatRequest.converted(ChatApi(self.response, NAMES), conversation, fields)

    def response(
        self, endpoint: Endpoint, request_id: str, parser: Callable[[], MessageParser], prompt_tokens: int
    ) -> ResponseBuilder:
        """Return the builder of the response in the form of the Responses API.

        `parser` makes a parser of thoughts and tool calls; `prompt_tokens` is reported as usage.
        """
        settings = self.model_dump(by_alias=True, exclude={"input"})
        return ResponsesResponse(request_id, endpoint.name, endpoint.texts, parser, prompt_tokens, settings)

    def _messages(self) -> list[dict[str, Any]]:
        """Return the instructions and input as the messages of a chat."""
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        for number, item in enumerate(items):
            _add_item(messages, item, f"input.{number}")
        return messages

    def _format(self) -> ResponseFormat | None:
        """Return the requested format of the text as /v1/chat/completions has it; None if there is none."""
        form = None if self.text is None else self.text.format
        if form is None:
            return None
        schema = {"name": form.name, "schema": form.schema_} if form.type == "json_schema" else None
        return ResponseFormat(type=form.type, json_schema=schema)


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any], place: str) -> None:
    """Add an item of the input to the messages of a conversation; an assistant's items in a row are one message.

    Raises:
        FieldError: the item is of an unsupported type, or lacks a field; the message names its `place`.
    """
    kind = item.get("type", "message")
    try:
        if kind == "message":
            if not isinstance(item["role"], str):
                raise FieldError("input", f"{place}.role must be a text")
            message = {"role": item["role"], "content": text_parts(item["content"], "input", place)}
            if item["role"] == "assistant" and messages and messages[-1].keys() == {"role", "reasoning_content"}:
                messages[-1].update(message)
            else:
                messages.append(message)
        elif kind == "function_call":
            function = {"name": item["name"], "arguments": item.get("arguments") or "{}"}
            call = {"id": item.get("call_id") or item.get("id"), "type": "function", "function": function}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = text_parts(item["output"], "input", place)
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        elif kind == "reasoning":
            thought = "".join(str(part.get("text") or "") for part in item.get("content") or ())
            messages.extend([{"role": "assistant", "reasoning_content": thought}] if thought else [])
        else:
            raise FieldError("input", f"{place} is of type {kind!r:.40}, which is not supported here")
    except KeyError as error:
        raise FieldError("input", f"{place} has no {error}") from error


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool as a conversation has it; in the Responses API the fields of its function are beside its type.

    Raises:
        FieldError: the tool is no function.
    """
    if tool.get("type") != "function":
        raise FieldError("tools", f"tools has one of type {tool.get('type')!r:.40}; only functions are supported")
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _choice(choice: str | dict[str, Any] | None) -> Any:
    """Return the tool choice as /v1/chat/completions has it. FieldError for a tool that is no function."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function":
        raise FieldError("tool_choice", f"tool_choice is {json.dumps(choice)[:80]}; only functions are supported")
    return {"type": "function", "function": {"name": choice.get("name", "")}}
