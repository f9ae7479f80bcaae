"""The functions that a chat model may call: OpenAI's `tools` and `tool_choice`."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from sharp.serving.api.errors import FieldError
from sharp.serving.api.guided import Guided
from sharp.serving.api.sampling_fields import StrictMessage, one_of
from sharp.serving.text.tool_calls import CALL_END, CALL_START

MAX_TOOLS = 128
# As templates write calls, and so as models were trained: blanks without end are no arguments. llguidance's own key.
LAYOUT = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}


class FunctionDefinition(StrictMessage):
    """A function; `parameters` is the JSON schema of its arguments, none is any object.

    `strict` promises that calls obey the schema. Required ones do anyway.
    """

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictMessage):
    """A tool; there are no others than functions."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(StrictMessage):
    """The name of a function."""

    model_config = ConfigDict(extra="ignore")

    name: str


class NamedTool(StrictMessage):
    """The choice of one function."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool,
    one_of('"none", "auto", "required" or {"type": "function", "function": {"name": ...}}'),
]


def callable_tools(tools: Sequence[Tool], choice: ToolChoice | None) -> list[Tool]:
    """The tools that a completion may call; none if tool_choice forbids it.

    Raises:
        FieldError: too many tools, two of the same name, or a choice that is not among them.
    """
    if len(tools) > MAX_TOOLS:
        raise FieldError("tools", f"tools has {len(tools)} entries; the limit is {MAX_TOOLS}")
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise FieldError("tools", "tools has two functions of the same name; names must differ")
    if isinstance(choice, NamedTool):
        if choice.function.name not in names:
            raise FieldError("tool_choice", f"tool_choice is the function {choice.function.name!r}; tools has no such")
        return [tool for tool in tools if tool.function.name == choice.function.name]
    if choice == "required" and not tools:
        raise FieldError("tool_choice", "tool_choice is 'required' and tools is empty; give at least one tool")
    return [] if choice == "none" else list(tools)


def calls_only(tools: Sequence[Tool], *, several: bool) -> Guided:
    """A completion that is nothing but calls of these tools, with arguments that match the schemas.

    Raises:
        FieldError: the schemas are too long.
    """
    start = "start: call" + (r' ("\n" call)*' if several else "")
    schemas = [tool.function.parameters or {} for tool in tools]
    return _guided([start, "call: mark_0 in_call", *_rules(tools, schemas)], "required")


def calls_or_words(tools: Sequence[Tool], *, several: bool) -> Guided:
    """A completion in words, in which every call is of one of these tools; a strict tool's arguments match its schema.

    Raises:
        FieldError: the schemas are too long.
    """
    start = "start: " + ("call* without_mark_0" if several else "call | without_mark_0")
    schemas = [(tool.function.parameters or {}) if tool.function.strict else {} for tool in tools]
    return _guided([start, "call: to_mark_0 in_call", *_rules(tools, schemas)], "strict")


def _rules(tools: Sequence[Tool], schemas: Sequence[dict[str, Any]]) -> list[str]:
    """What stands in a call: every function has a rule of its own, so `$ref` in its schema means what it says."""
    functions = " | ".join(f"call_{number}" for number in range(len(tools)))
    rules = [rf'in_call: "\n" ({functions}) "\n" mark_1']
    for number, (tool, schema) in enumerate(zip(tools, schemas, strict=True)):
        opening = json.dumps(f'{{"name": {json.dumps(tool.function.name)}, "arguments": ')
        rules.append(f'call_{number}: {opening} arguments_{number} "}}"')
        rules.append(f"arguments_{number}: %json {json.dumps({'type': 'object', **schema, **LAYOUT})}")
    return rules


def _guided(rules: list[str], what: str) -> Guided:
    try:
        return Guided(grammar="\n".join(rules), marks=(CALL_START, CALL_END))
    except FieldError as error:
        raise FieldError("tools", f"tools are too long to be {what}: {error}") from error
