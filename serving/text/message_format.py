"""`MessageFormat`: the form in which a chat template reads messages, found by rendering sample messages."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from sharp.serving.api.errors import InputError

Message: TypeAlias = Mapping[str, Any]
# Renders messages, with a tool if the second argument is true.
Render: TypeAlias = Callable[[Sequence[Message], bool], str]

MARK = "sharpmark{}end"  # a text that no template trims, splits or escapes
# The template's text for a conversation with a tool call shows the format in which the model writes calls.
SAMPLE_TOOL = {
    "type": "function",
    "function": {"name": "sample", "description": "A sample.", "parameters": {"type": "object", "properties": {}}},
}
SAMPLE_CALL = {"id": "call00000", "type": "function", "function": {"name": "sample", "arguments": {}}}
SAMPLE_QUESTION = {"role": "user", "content": "a"}
SAMPLE_ANSWER = {"role": "assistant", "content": "", "tool_calls": [SAMPLE_CALL]}
# The messages before and after a sample message of each role, because some templates require roles in order.
AROUND: dict[str, tuple[list[Message], list[Message]]] = {
    "user": ([], []),
    "system": ([], [SAMPLE_QUESTION]),
    "assistant": ([SAMPLE_QUESTION], [SAMPLE_QUESTION]),
    "tool": ([SAMPLE_QUESTION, SAMPLE_ANSWER], []),
}
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # the names of reasoning in templates and APIs


@dataclass(frozen=True)
class MessageFormat:
    """The form in which a chat template reads messages.

    Attributes:
        texts: the roles whose content may be a text.
        parts: the roles whose content may be a list of parts.
        no_content: the content of an assistant's message that has only calls: no field, as in transformers, or "" or
            None if the template shows the calls only then.
        text_arguments: whether the arguments of a call may be a text; arguments that were cut off are no object.
        developer: whether the template knows the role `developer`; otherwise such messages get the role `system`.
        thoughts: the fields of an assistant's message in which the template reads reasoning.
    """

    texts: frozenset[str] = frozenset(AROUND)
    parts: frozenset[str] = frozenset()
    no_content: Mapping[str, str | None] = field(default_factory=lambda: {"content": ""})
    text_arguments: bool = True
    developer: bool = False
    thoughts: frozenset[str] = field(default_factory=frozenset)

    def message(self, message: Message) -> dict[str, Any]:
        """Return a message as the template reads it. The content of `message` is a text, a list of parts, or None."""
        role = "system" if message["role"] == "developer" and not self.developer else message["role"]
        content = message.get("content")
        thought = next((message[name] for name in THOUGHTS if isinstance(message.get(name), str)), None)
        thoughts = {} if not thought or role != "assistant" else dict.fromkeys(self.thoughts, thought)
        known = role if role in AROUND else "user"
        if not content and message.get("tool_calls"):
            message = {name: value for name, value in message.items() if name != "content"}
            return self._with_calls({**message, **thoughts, "role": role, **self.no_content})
        if isinstance(content, list) and known not in self.parts:
            content = "".join(part.get("text", "") for part in content)
        elif not isinstance(content, list) and known not in self.texts:
            content = [{"type": "text", "text": content}] if content else []
        elif content is None:
            content = ""
        return self._with_calls({**message, **thoughts, "role": role, "content": content})

    def _with_calls(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the message with the arguments of its tool calls as objects, unless the template takes text."""
        if (calls := message.get("tool_calls")) and not self.text_arguments:
            return {**message, "tool_calls": [_with_object(call) for call in calls]}
        return message


def found_format(render: Render, source: str) -> MessageFormat:
    """Return the format that a template reads, found by rendering marked messages. `source` is the template's text."""

    def shown(messages: Sequence[Message], *marks: str, tools: bool = False) -> str:
        """Return the rendered text of messages, or "" if the template refuses them or leaves a mark out."""
        try:
            text = render(messages, tools)
        except InputError:  # a template can fail like any program
            return ""
        return text if all(mark in text for mark in marks) and not _is_written_out(text) else ""

    mark = MARK.format(0)
    texts: set[str] = set()
    parts: set[str] = set()
    for role, (before, after) in AROUND.items():
        for roles, content in ((texts, mark), (parts, [{"type": "text", "text": mark}])):
            if shown([*before, {"role": role, "content": content}, *after], mark, tools=role == "tool"):
                roles.add(role)
    unknown = AROUND.keys() - texts - parts  # roles that no sample showed: treat them as the user's role, or as texts
    texts |= unknown if "user" in texts or "user" not in parts else set()
    parts |= unknown if "user" in parts else set()

    def with_call(arguments: Any, content: Mapping[str, str | None]) -> str:
        """Render a sample conversation whose last message has a tool call with these arguments."""
        call = {**SAMPLE_CALL, "function": {"name": "sample", "arguments": arguments}}
        message = {"role": "assistant", "tool_calls": [call], **content}
        return shown([SAMPLE_QUESTION, message], mark, tools=True)

    contents: tuple[dict[str, str | None], ...] = ({}, {"content": ""}, {"content": None})
    no_content = next((content for content in contents if with_call({mark: mark}, content)), None)
    return MessageFormat(
        frozenset(texts),
        frozenset(parts),
        {"content": ""} if no_content is None else no_content,
        no_content is None or bool(with_call(mark, no_content)),
        "developer" in source,
        frozenset(name for name in THOUGHTS if name in source),
    )


def _with_object(call: Message) -> dict[str, Any]:
    """Return a call whose arguments are an object. Arguments that are a text become its value `arguments`."""
    arguments = call["function"]["arguments"]
    arguments = arguments if isinstance(arguments, dict) else {"arguments": arguments}
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _is_written_out(text: str) -> bool:
    """Whether a template wrote a list of parts as Python or JSON writes lists, instead of the text in the parts."""
    return any(f"{quote}type{quote}: {quote}text{quote}" in text for quote in "\"'")


def marked(messages: Sequence[Message]) -> tuple[list[dict[str, Any]], dict[int, list[str]]]:
    """Return messages with marks in place of texts and of arguments of calls, and the marks by the message's number.

    An assistant's text beside calls gets no mark, because the templates of several families leave it out.
    """
    made: list[dict[str, Any]] = []
    marks: dict[int, list[str]] = {}

    def mark(number: int) -> str:
        """Return a new mark for text `number`, to be found again in the rendered template."""
        marks.setdefault(number, []).append(MARK.format(f"{number}x{len(marks[number]) if number in marks else 0}x"))
        return marks[number][-1]

    for number, message in enumerate(messages):
        content, calls = message.get("content"), message.get("tool_calls") or ()
        if isinstance(content, str) and content.strip() and not calls:
            content = mark(number)
        elif isinstance(content, list) and not calls:
            content = [{**part, "text": mark(number) if part.get("text", "").strip() else ""} for part in content]
        changed = {**message, **({"content": content} if "content" in message else {})}
        if calls:
            changed["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": {mark(number): number}}} for call in calls
            ]
        made.append(changed)
    return made, marks
