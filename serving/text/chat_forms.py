"""`ChatForms`: how a model writes calls of tools and thoughts, and `MessageParser`, which takes them out of a text."""

import re
from dataclasses import dataclass

from sharp.serving.api_config import ApiConfig
from sharp.serving.text.chat_template import ChatTemplate
from sharp.serving.text.reasoning import FORMS, ReasoningForm, ReasoningParser
from sharp.serving.text.tool_calls import CALL_START, ToolCall, ToolCallParser
from sharp.serving.text.tool_parsers import TOOL_CALLS, Llama3Parser, MistralParser, PythonicParser

# As the instructions of templates show Hermes' form; with other fields first it would be no JSON that is read here.
SHOWN_CALL = re.compile(CALL_START + r"""\s*\{\s*["'](name|arguments)["']""")
PARAMETERS = '"properties"'  # in the description of the tool, which looks like a call, too
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
    """How a model writes what is not the text of its message.

    Attributes:
        tools: the parser of its calls; None where it writes them in a form that nobody reads.
        reasoning: the marks of its thoughts; None where it has none, or they stay in the text.
    """

    tools: type[ToolCallParser] | None = ToolCallParser
    reasoning: ReasoningForm | None = None

    @property
    def shows_special_tokens(self) -> bool:
        """Whether its marks are special tokens, without which they cannot be seen."""
        thoughts = self.reasoning is not None and self.reasoning.special_tokens
        return thoughts or (self.tools is not None and self.tools.special_tokens)


def chat_forms(template: ChatTemplate | None, api: ApiConfig) -> ChatForms:
    """Those that the settings say, or the template shows."""
    reasoning = FORMS.get(api.reasoning_parser)
    if api.tool_parser != "auto":
        return ChatForms(PARSERS[api.tool_parser], reasoning)
    return ChatForms(None if template is None else found_parser(template), reasoning)


def found_parser(template: ChatTemplate) -> type[ToolCallParser] | None:
    """The parser that reads calls as a template writes them, or tells the model to.

    `<tool_call>` alone says nothing: Qwen3-Coder and GLM have XML in it.
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
    """What became certain of a message."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()


class MessageParser:
    """Takes thoughts and calls out of a growing text."""

    def __init__(self, tools: ToolCallParser | None = None, reasoning: ReasoningParser | None = None) -> None:
        self._tools = tools
        self._reasoning = reasoning
        self.known = 0  # calls that were returned

    def push(self, text: str) -> MessageParts:
        """Add `text`."""
        thought, content = ("", text) if self._reasoning is None else self._reasoning.push(text)
        return self._parts(thought, content)

    def end(self, *, cut: bool = False) -> MessageParts:
        """What was held back, once no more will come: of a text that was `cut` off, a call that began is none."""
        thought, content = ("", "") if self._reasoning is None else self._reasoning.end()
        parts = self._parts(thought, content)
        if self._tools is None:
            return parts
        content = parts.content + self._tools.end(cut=cut)
        return MessageParts(thought, content, parts.calls + self._new_calls())

    def _parts(self, thought: str, content: str) -> MessageParts:
        if self._tools is None:
            return MessageParts(thought, content)
        return MessageParts(thought, self._tools.push(content)[0], self._new_calls())

    def _new_calls(self) -> tuple[ToolCall, ...]:
        calls = tuple((self._tools.calls if self._tools else [])[self.known :])
        self.known += len(calls)
        return calls
