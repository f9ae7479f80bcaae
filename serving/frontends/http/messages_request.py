"""The request of Anthropic's Messages API, as one of `/v1/chat/completions`."""

import json
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import ValidationError
from starlette.responses import JSONResponse, Response

from sharp.serving.api.errors import ContextLengthError, FieldError, SharpError
from sharp.serving.api.request import Prompt
from sharp.serving.api.sampling_fields import (
    FAIL_FAST,
    NULL_IS_UNSET,
    Flag,
    Number,
    StrictMessage,
    WholeNumber,
    first_error,
    one_of,
)
from sharp.serving.engine.model_folder import ModelFolder
from sharp.serving.frontends.http.chat_request import ChatRequest, ConvertedRequest
from sharp.serving.frontends.http.endpoint import Endpoint
from sharp.serving.frontends.http.errors import error_body, error_response
from sharp.serving.frontends.http.messages_response import MessagesResponse, error_event
from sharp.serving.frontends.http.openai_response import ResponseBuilder
from sharp.serving.frontends.http.tokenization import TokenizerRequest
from sharp.serving.text.chat_template import ChatTemplate
from sharp.serving.text.tokenizer import check_characters, tokenize

CHOICES = {"auto": "auto", "any": "required", "none": "none"}
NAMES = {"max_completion_tokens": "max_tokens", "stop": "stop_sequences"}
Content = Annotated[str | list[dict[str, Any]], one_of("a text or a list of blocks")]


class Turn(StrictMessage):
    """A message of the conversation."""

    role: str
    content: Content


class MessagesRequest(ConvertedRequest):
    """The body of `/v1/messages`."""

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
    metadata: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    service_tier: str | None = None
    output_config: dict[str, Any] | None = None
    container: Any = None
    mcp_servers: Any = None
    context_management: Any = None

    def generation(self) -> ChatRequest:
        """See `ConvertedRequest`."""
        messages: list[dict[str, Any]] = []
        if self.system:
            messages.append({"role": "system", "content": _text(self.system, "system")})
        for number, turn in enumerate(self.messages):
            _add_turn(messages, turn, f"messages.{number}")
        choice = self.tool_choice or {}
        kind = choice.get("type")
        named = {"type": "function", "function": {"name": str(choice.get("name"))}} if kind == "tool" else None
        if kind not in (None, "tool", *CHOICES):
            raise FieldError("tool_choice", f"tool_choice is {kind!r:.40}; it must be auto, any, tool or none")
        body = {
            "model": self.model,
            "messages": messages,
            "max_completion_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "tools": [_tool(tool) for tool in self.tools or ()] or None,
            "tool_choice": (named or CHOICES.get(str(kind))) if self.tools else None,
            "parallel_tool_calls": not choice.get("disable_parallel_tool_use"),
            "response_format": _format(self.output_config),
        }
        body |= {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "stream")}
        return _MessagesChat.model_validate(body)


def _format(output_config: dict[str, Any] | None) -> dict[str, Any] | None:
    """The format of the text, as a conversation has it."""
    form = (output_config or {}).get("format")
    if form is None:
        return None
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        raise FieldError("output_config", "output_config.format must be of the type json_schema")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": form.get("schema")}}


class CountTokensRequest(MessagesRequest, TokenizerRequest):
    """The body of `/v1/messages/count_tokens`, the same without a limit."""

    max_tokens: WholeNumber = 1

    def respond(self, model: ModelFolder, template: ChatTemplate | None) -> dict[str, Any]:
        """See `TokenizerRequest`."""
        try:
            text = self.generation().rendered(template)
        except ValidationError as error:  # of what it holds as a conversation has it
            raise first_error(error) from error
        check_characters(text, model.context_limit)
        return {"input_tokens": len(tokenize(text, model.manifest, model.tokenizer, special_tokens=False))}


class _MessagesChat(ChatRequest):
    """A conversation whose response is of the Messages API."""

    def response(
        self, endpoint: Endpoint, request_id: str, prompts: Sequence[Prompt], computed: Sequence[Sequence[int]]
    ) -> ResponseBuilder:
        """See `GenerationRequest`."""
        prompt = str(prompts[0])
        return MessagesResponse(
            request_id, endpoint.name, endpoint.texts, lambda: self.message_parser(prompt), len(computed[0])
        )

    def renamed(self, error: FieldError) -> FieldError:
        """See `GenerationRequest`."""
        error = super().renamed(error)
        name = NAMES.get(error.field, error.field)
        if isinstance(error, ContextLengthError) or name == error.field:
            return error
        return FieldError(name, str(error).replace(error.field, name, 1))


def messages_refusal(error: SharpError) -> Response:
    """A refusal as Anthropic writes it."""
    status, body = error_body(error)
    headers = {name: value for name, value in error_response(error).headers.items() if name == "retry-after"}
    return JSONResponse(error_event(body), status, headers)


def _add_turn(messages: list[dict[str, Any]], turn: Turn, place: str) -> None:
    """Add a message; results of tools become messages of their own."""
    if isinstance(turn.content, str):
        messages.append({"role": turn.role, "content": turn.content})
        return
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    try:
        for block in turn.content:
            kind = block["type"]
            if kind == "text":
                texts.append(str(block["text"]))
            elif kind == "tool_use":
                function = {"name": block["name"], "arguments": json.dumps(block.get("input") or {})}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            elif kind == "tool_result":
                result = _text(block.get("content") or "", place)
                messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result})
            elif kind not in ("thinking", "redacted_thinking"):
                raise FieldError("messages", f"{place} has a block of type {kind!r:.40}; only text and tools are read")
    except KeyError as error:
        raise FieldError("messages", f"{place} has a block without {error}") from error
    if texts or calls:
        message = {"role": turn.role, "content": "".join(texts)}
        messages.append(message | ({"tool_calls": calls} if calls else {}))


def _text(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise FieldError("messages", f"{place} has content that is neither a text nor a list of blocks")
    for block in content:
        if block.get("type") != "text":
            raise FieldError("messages", f"{place} has a block of type {block.get('type')!r:.40}; only text is read")
    return "".join(str(block.get("text", "")) for block in content)


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
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
