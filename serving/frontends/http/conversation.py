"""`Conversation`: messages and tools, and the prompt that a chat template makes of them."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, model_validator

from sharp.serving.api.errors import FieldError
from sharp.serving.frontends.http.tools import Tool, ToolChoice, callable_tools
from sharp.serving.frontends.json_fields import FAIL_FAST, Flag, RequestBody, StrictMessage, one_of
from sharp.serving.text.chat_template import ChatTemplate, NoChatTemplate
from sharp.serving.text.tool_calls import read_json

# The types of parts that are text, each with the field that holds the text.
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


class Part(StrictMessage):
    """A part of a message: a text, or the reason why the model refused. Other parts are not supported."""

    model_config = ConfigDict(extra="ignore")  # such as cache_control, without a warning: a union's member has none

    type: Literal["text", "input_text", "output_text", "refusal"]
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _has_its_text(self) -> "Part":
        """Check that the part has its text or refusal, else raise ValueError."""
        if (self.refusal if self.type == "refusal" else self.text) is None:
            raise ValueError("a part has no text")
        return self

    def for_template(self) -> dict[str, str]:
        """Return the part as templates expect it: a part of type "text"."""
        return {"type": "text", "text": (self.refusal if self.type == "refusal" else self.text) or ""}


class CalledFunction(BaseModel):
    """A function that an assistant called; `arguments` is a JSON text, nothing, or the object itself."""

    name: str
    arguments: Annotated[str | dict[str, Any] | None, one_of("a text of JSON, or an object")] = None


class CalledTool(BaseModel):
    """A tool call in an assistant's message of a conversation: the function and its arguments."""

    model_config = ConfigDict(extra="allow", frozen=True)

    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """Return the call as templates expect it: its arguments as an object, or as their text if that is no JSON."""
        given = self.function.arguments
        arguments = read_json(given) if isinstance(given, str) else given
        function = {"name": self.function.name, "arguments": arguments or {}}
        return {**(self.model_extra or {}), "type": "function", "function": function}


class ChatMessage(BaseModel):
    """A message of a conversation; what else it has is the template's to read."""

    model_config = ConfigDict(extra="allow", frozen=True)

    role: str
    content: Annotated[
        str | list[Part] | None,
        one_of('a text or a list of parts {"type": "text", "text": ...}; only text parts are supported'),
    ] = None
    refusal: str | None = None
    tool_calls: list[CalledTool] | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the message for a template: content as it was sent, and `tool_calls` only if there are some.

        A refusal takes the place of empty content.
        """
        content: Any = self.content or self.refusal
        if isinstance(content, list):
            content = [part.for_template() for part in content]
        message = {**(self.model_extra or {}), "role": self.role, "content": content}
        return message | ({"tool_calls": [call.for_template() for call in self.tool_calls]} if self.tool_calls else {})


def text_parts(content: Any, field: str, place: str) -> str | list[dict[str, Any]]:
    """Check the content of a message of another API and return it unchanged, as `ChatMessage` reads the parts.

    Raises:
        FieldError: the content is neither a text nor a list of parts of text.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise FieldError(field, f"{place} has content that is neither a text nor a list of parts")
    for part in content:
        if part.get("type") not in TEXT_PARTS or not isinstance(part.get(TEXT_PARTS[part["type"]]), str):
            kind = part.get("type")
            raise FieldError(field, f"{place} has a part of type {kind!r:.40}; only text is supported")
    return content


class Conversation(RequestBody):
    """The fields of a request from which a chat template makes the prompt: messages, tools and variables."""

    messages: Annotated[list[ChatMessage], FAIL_FAST]
    tools: Annotated[list[Tool], FAIL_FAST] | None = None
    tool_choice: ToolChoice | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: Flag = True
    continue_final_message: Flag = False

    @property
    def template_variables(self) -> dict[str, Any]:
        """The variables that the chat template gets if it knows them."""
        return {}

    @property
    def callable(self) -> list[Tool]:
        """The tools that the completion may call.

        Raises:
            FieldError: there are too many tools, two of the same name, or not the one that `tool_choice` names.
        """
        return callable_tools(self.tools or (), self.tool_choice)

    def rendered(self, template: ChatTemplate | NoChatTemplate) -> str:
        """Return the conversation as a text with its special tokens.

        Raises:
            FieldError: there are no messages, or a message, a tool or a variable does not fit the template.
        """
        if not self.messages:
            raise FieldError("messages", "messages is an empty list; give at least one message")
        if self.continue_final_message and self.add_generation_prompt:
            message = "continue_final_message is true; it needs add_generation_prompt to be false"
            raise FieldError("continue_final_message", message)
        return template.render(
            [message.for_template() for message in self.messages],
            [tool.model_dump(exclude_none=True) for tool in self.callable],
            variables={**template.known(self.template_variables), **(self.chat_template_kwargs or {})},
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
        )
