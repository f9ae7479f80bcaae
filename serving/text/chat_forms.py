"""`ChatForms`: the formats of a model's tool calls and reasoning. `MessageParser`: extracts both from a text."""

import re
from dataclasses import dataclass

from sharp.serving.api_config import ApiConfig
from sharp.serving.text.chat_template import ChatTemplate, NoChatTemplate
from sharp.serving.text.reasoning import FORMS, ReasoningForm, ReasoningParser
from sharp.serving.text.tool_calls import CALL_START, ToolCall, ToolCallParser
from sharp.serving.text.tool_parsers import TOOL_CALLS, Llama3Parser, MistralParser, PythonicParser

# Hermes' format as the instructions in templates show it. With other fields first, `ToolCallParser` cannot read the
# calls.
SHOWN_CALL = re.compile(CALL_START + r"""\s*\{\s*["'](name|arguments)["']""")
PARAMETERS = '"properties"'  # part of the description of a tool, which also looks like a call
PARSERS: dict[str, type[ToolCallParser]] = {
    "hermes": ToolCallParser,
    "qwen": ToolCallParser,
    "llama3": Llama3Parser,
    "llama3_json": Llama3Parser,  # vLLM's name
    "mistral": MistralParser,
    "pythonic": PythonicParser,
}


@dataclass(frozen=True)
class ChatForms:
    """The formats in which a model writes tool calls and reasoning.

    Attributes:
        tools: the parser of the model's calls; None if no parser reads the model's format.
        reasoning: the marks of the model's reasoning; None if it has none, or if reasoning stays in the text.
    """

    tools: type[ToolCallParser] | None = ToolCallParser
    reasoning: ReasoningForm | None = None

    @property
    def shows_special_tokens(self) -> bool:
        """Whether the marks of calls or reasoning are special tokens, so that text must include special tokens."""
        thoughts = self.reasoning is not None and self.reasoning.special_tokens
        return thoughts or (self.tools is not None and self.tools.special_tokens)


def chat_forms(template: ChatTemplate | NoChatTemplate, api: ApiConfig) -> ChatForms:
    """Return the forms that the settings name, or else those that the template shows."""
    reasoning = FORMS.get(api.reasoning_parser)
    if api.tool_parser != "auto":
        return ChatForms(PARSERS[api.tool_parser], reasoning)
    return ChatForms(found_parser(template) if isinstance(template, ChatTemplate) else None, reasoning)


def found_parser(template: ChatTemplate) -> type[ToolCallParser] | None:
    """Return the parser for the format of calls that a template writes or describes, or None.

    `<tool_call>` alone is no proof of Hermes' format, because Qwen3-Coder and GLM write XML inside it.
    """
    text = template.sample_call()
    if ToolCallParser().push(text)[1] or SHOWN_CALL.search(text):
        return ToolCallParser
    if TOOL_CALLS in text:
        parser = MistralParser()
        parser.push(text)
        parser.end()
        return MistralParser if parser.calls else None
    if CALL_START in text:
        return None
    if re.search(r"""\{\s*"name":\s*"sample",\s*"parameters":""", text.rpartition(PARAMETERS)[2]):
        return Llama3Parser
    return PythonicParser if "[sample(" in text else None


@dataclass(frozen=True)
class MessageParts:
    """New parts of a message that are final: reasoning, content and calls."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()


class MessageParser:
    """A parser that extracts reasoning and tool calls from a growing text: `push` its pieces, then `end` it once."""

    def __init__(self, tools: ToolCallParser | None = None, reasoning: ReasoningParser | None = None) -> None:
        self._tools = tools
        self._reasoning = reasoning
        self.known = 0  # number of calls returned so far

    def push(self, text: str) -> MessageParts:
        """Add `text` and return the parts of the message that are now final."""
        thought, content = ("", text) if self._reasoning is None else self._reasoning.push(text)
        return self._parts(thought, content)

    def end(self, *, cut: bool = False) -> MessageParts:
        """Return the held-back parts after the last `push`. If the text was `cut` off, drop an unfinished call."""
        thought, content = ("", "") if self._reasoning is None else self._reasoning.end()
        parts = self._parts(thought, content)
        if self._tools is None:
            return parts
        content = parts.content + self._tools.end(cut=cut)
        return MessageParts(thought, content, parts.calls + self._new_calls())

    def _parts(self, thought: str, content: str) -> MessageParts:
        """Return thoughts and text as parts of a message, with the tool calls taken out of the text."""
        if self._tools is None:
            return MessageParts(thought, content)
        return MessageParts(thought, self._tools.push(content)[0], self._new_calls())

    def _new_calls(self) -> tuple[ToolCall, ...]:
        """Return the tool calls that were completed since the last time."""
        calls = tuple((self._tools.calls if self._tools else [])[self.known :])
        self.known += len(calls)
        return calls
