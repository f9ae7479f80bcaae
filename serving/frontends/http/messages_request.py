"""The request of Anthropic's Messages API, as one of `/v1/chat/completions`."""

import json
from collections.abc import Callable
from typing import Annotated, Any

from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from sharp.serving.api.errors import FieldError, SharpError
from sharp.serving.engine.served_model import ServedModel
from sharp.serving.frontends.foreign_fields import OF_MESSAGES
from sharp.serving.frontends.http.chat_request import ChatApi, ChatRequest
from sharp.serving.frontends.http.conversation import text_parts
from sharp.serving.frontends.http.endpoint import Endpoint
from sharp.serving.frontends.http.errors import error_body, error_response
from sharp.serving.frontends.http.messages_response import MessagesResponse, error_event
from sharp.serving.frontends.http.tokenization import TokenizerRequest
from sharp.serving.frontends.json_fields import (
    FAIL_FAST,
    NULL_IS_UNSET,
    Flag,
    Number,
    RequestBody,
    StrictMessage,
    WholeNumber,
    one_of,
)
from sharp.serving.frontends.structured_outputs import ResponseFormat
from sharp.serving.text.chat_forms import MessageParser
from sharp.serving.text.chat_template import ChatTemplate, NoChatTemplate
from sharp.serving.text.tokenizer import check_characters, tokenize

CHOICES = {"auto": "auto", "any": "required", "none": "none"}
NAMES = {"max_completion_tokens": "max_tokens", "stop": "stop_sequences"}
Content = Annotated[str | list[dict[str, Any]], one_of("a text or a list of blocks")]


class Turn(StrictMessage):
    """A message of the conversation in a body of `/v1/messages`: who speaks (`role`), and the text or blocks."""

    role: str
    content: Content


class MessagesRequest(RequestBody):
    """The body of `/v1/messages`."""

    foreign = OF_MESSAGES

    messages: Annotated[list[Turn], FAIL_FAST]
    max_tokens: WholeNumber
    model: Annotated[str, NULL_IS_UNSET] = ""
    system: Content | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: WholeNumber | None = None
    stop_sequences: Annotated[list[str], FAIL_FAST] | None = None
    stream: Flag = False
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None

    def generation(self) -> ChatRequest:
        """Return the request as one of `/v1/chat/completions`.

        Raises:
            FieldError: a field cannot be used, or not be honoured.
        """
        messages: list[dict[str, Any]] = []
        if self.system:
            messages.append({"role": "system", "content": text_parts(self.system, "messages", "system")})
        for number, turn in enumerate(self.messages):
            _add_turn(messages, turn, f"messages.{number}")
        choice = self.tool_choice or {}
        kind = choice.get("type")
        named = {"type": "function", "function": {"name": str(choice.get("name"))}} if kind == "tool" else None
        if kind not in (None, "tool", *CHOICES):
            raise FieldError("tool_choice", f"tool_choice is {kind!r:.40}; it must be auto, any, tool or none")
        conversation = {
            "messages": messages,
            "tools": [_tool(tool) for tool in self.tools or ()] or None,
            "tool_choice": (named or CHOICES.get(str(kind))) if self.tools else None,
        }
        fields = {
            "max_completion_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "parallel_tool_calls": not choice.get("disable_parallel_tool_use"),
            "response_format": _format(self.output_config),
        }
        fields |= {name: getattr(self, name) for name in ("model", "temperature", "top_p", "top_k", "stream")}
        return ChatRequest.converted(ChatApi(_response, NAMES), conversation, fields)


def _response(
    endpoint: Endpoint, request_id: str, parser: Callable[[], MessageParser], prompt_tokens: int
) -> MessagesResponse:
    """Return the builder of the response in Anthropic's form.

    `parser` makes a parser of thoughts and tool calls; `prompt_tokens` is reported as usage.
    """
    return MessagesResponse(request_id, endpoint.name, endpoint.texts, parser, prompt_tokens)


def _format(output_config: dict[str, Any] | None) -> ResponseFormat | None:
    """Return an `output_config` of `/v1/messages` as a conversation's `response_format`; None without a format.

    Raises:
        FieldError: the format is not json_schema.
    """
    form = (output_config or {}).get("format")
    if form is None:
        return None
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        raise FieldError("output_config", "output_config.format must be of the type json_schema")
    return ResponseFormat(type="json_schema", json_schema={"name": "output", "schema": form.get("schema")})


class CountTokensRequest(MessagesRequest, TokenizerRequest):
    """The body of `/v1/messages/count_tokens`: that of `/v1/messages`, in which `max_tokens` may be missing."""

    max_tokens: WholeNumber = 1

    def respond(self, model: ServedModel, template: ChatTemplate | NoChatTemplate) -> dict[str, Any]:
        """Return the number of tokens of the prompt, as `input_tokens`.

        Raises:
            FieldError: a field cannot be used with this model.
        """
        text = self.generation().rendered(template)
        check_characters(text, model.context_limit)
        return {"input_tokens": len(tokenize(text, model.manifest, model.tokenizer, special_tokens=False))}


def messages_refusal(error: SharpError, scope: Scope | None = None) -> Response:  # noqa: ARG001 - as `error_response`
    """Return a refusal as Anthropic's API writes it."""
    status, body = error_body(error)
    headers = {name: value for name, value in error_response(error).headers.items() if name == "retry-after"}
    return JSONResponse(error_event(body), status, headers)


def _add_turn(messages: list[dict[str, Any]], turn: Turn, place: str) -> None:
    """Append a message of `/v1/messages` to those of a conversation; results of tools become messages of their own.

    Raises:
        FieldError: a block is of an unsupported type, or lacks a field; the message names its `place`.
    """
    if isinstance(turn.content, str):
        messages.append({"role": turn.role, "content": turn.content})
        return
    texts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    try:
        for block in turn.content:
            kind = block["type"]
            if kind == "text":
                texts.append({"type": kind, "text": str(block["text"])})
            elif kind == "tool_use":
                function = {"name": block["name"], "arguments": json.dumps(block.get("input") or {})}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            elif kind == "tool_result":
                result = text_parts(block.get("content") or "", "messages", place)
                messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result})
            elif kind == "thinking":
                thoughts.append(str(block.get("thinking") or ""))
            elif kind != "redacted_thinking":
                raise FieldError("messages", f"{place} has a block of type {kind!r:.40}; only text and tools are read")
    except KeyError as error:
        raise FieldError("messages", f"{place} has a block without {error}") from error
    if texts or calls or thoughts:
        message: dict[str, Any] = {"role": turn.role, "content": texts or None}
        message |= {"reasoning_content": "".join(thoughts)} if thoughts else {}
        messages.append(message | ({"tool_calls": calls} if calls else {}))


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool of Anthropic's form in OpenAI's. FieldError if it is of a type other than "custom"."""
    if tool.get("type") not in (None, "custom"):
        raise FieldError(
            "tools", f"tools has one of type {tool.get('type')!r:.40}; only tools of clients are supported"
        )
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}
