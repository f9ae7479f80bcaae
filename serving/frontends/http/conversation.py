"""`Conversation`: messages and tools, and the prompt that a chat template makes of them."""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict

from sharp.serving.api.errors import FieldError, InputError
from sharp.serving.api.sampling_fields import FAIL_FAST, Flag, StrictMessage, one_of
from sharp.serving.frontends.http.tools import Tool, ToolChoice, callable_tools
from sharp.serving.text.chat_template import ChatTemplate


class TextPart(StrictMessage):
    """A part of a message; other parts than text are not supported."""

    model_config = ConfigDict(extra="ignore")  # such as cache_control: no text, and one of several types has no warning

    type: Literal["text"]
    text: str


class CalledFunction(BaseModel):
    """A function that an assistant called; `arguments` is a JSON text, nothing, or the object itself."""

    name: str
    arguments: Annotated[str | dict[str, Any] | None, one_of("a text of JSON, or an object")] = None


class CalledTool(BaseModel):
    """A call in an assistant's message."""

    model_config = ConfigDict(extra="allow", frozen=True)

    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """As templates expect it: arguments as an object."""
        arguments: Any = self.function.arguments or {}
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError) as error:
            message = f"messages has a call of {self.function.name!r} whose arguments are no JSON: {error}"
            raise FieldError("messages", message) from error
        function = {"name": self.function.name, "arguments": arguments}
        return {**(self.model_extra or {}), "type": "function", "function": function}


class ChatMessage(BaseModel):
    """A message of a conversation; what else it has is the template's to read."""

    model_config = ConfigDict(extra="allow", frozen=True)

    role: str
    content: Annotated[
        str | list[TextPart] | None,
        one_of('a text or a list of parts {"type": "text", "text": ...}; only text parts are supported'),
    ] = None
    tool_calls: list[CalledTool] | None = None

    def for_template(self) -> dict[str, Any]:
        """As templates expect it: one text, and calls only where there are some."""
        text = "".join(part.text for part in self.content) if isinstance(self.content, list) else self.content
        message = {**(self.model_extra or {}), "role": self.role, "content": text or ""}
        return message | ({"tool_calls": [call.for_template() for call in self.tool_calls]} if self.tool_calls else {})


class Conversation(StrictMessage):
    """The fields that a chat template makes a prompt of."""

    messages: Annotated[list[ChatMessage], FAIL_FAST]
    tools: Annotated[list[Tool], FAIL_FAST] | None = None
    tool_choice: ToolChoice | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: Flag = True
    continue_final_message: Flag = False

    @property
    def template_variables(self) -> dict[str, Any]:
        """What the template gets if it knows it."""
        return {}

    @property
    def callable(self) -> list[Tool]:
        """The tools that the completion may call."""
        return callable_tools(self.tools or (), self.tool_choice)

    def rendered(self, template: ChatTemplate | None) -> str:
        """The conversation as a text with its special tokens."""
        if template is None:
            raise InputError("the model has no chat template; use /v1/completions")
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
