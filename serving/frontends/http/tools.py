"""The functions that a chat model may call: OpenAI's `tools` and `tool_choice`."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from sharp.serving.api.errors import FieldError
from sharp.serving.api.guided import Guided
from sharp.serving.api.json_formats import with_real_dates
from sharp.serving.frontends.json_fields import StrictMessage, one_of
from sharp.serving.text.tool_calls import CALL_END, CALL_START

MAX_TOOLS = 128
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "additionalProperties": False}
# The keys that say nothing about properties beyond those that a schema names.
ANNOTATED = {"type", "properties", "required", "title", "description", "$schema", "$defs", "definitions"}
# The keys by which another schema may name further properties of the same object.
COMBINING = ("allOf", "oneOf", "not", "if", "dependentSchemas")
# The layout of calls in templates, and so in the training of models. Without it arguments might be blanks without end.
# The key is llguidance's own.
LAYOUT = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}


class FunctionDefinition(StrictMessage):
    """The definition of a function that a completion may call.

    `parameters` is the JSON schema of its arguments; without properties there, it has no arguments. `strict` promises
    that calls obey the schema; required calls do in any case.
    """

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictMessage):
    """A tool that a completion may call, an entry of the field `tools`. Only functions are supported."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(StrictMessage):
    """The function that `tool_choice` names, an object with the function's name."""

    model_config = ConfigDict(extra="ignore")

    name: str


class NamedTool(StrictMessage):
    """The value of `tool_choice` that requires a call of one function."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool,
    one_of('"none", "auto", "required" or {"type": "function", "function": {"name": ...}}'),
]


def callable_tools(tools: Sequence[Tool], choice: ToolChoice | None) -> list[Tool]:
    """Return the tools that a completion may call; none if tool_choice forbids calls.

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
    """Return a grammar of nothing but calls of these tools, with arguments that match the schemas.

    `several` allows more than one call.

    Raises:
        FieldError: the schemas are too long.
    """
    start = "start: call" + (r' ("\n" call)*' if several else "")
    return _guided([start, "call: mark_0 in_call", *_rules(tools, schemas_of(tools))], "required")


def calls_or_json(tools: Sequence[Tool], schema: Any, *, several: bool) -> Guided:
    """Return a grammar of either calls of these tools or JSON that matches the schema.

    `several` allows more than one call.

    Raises:
        FieldError: the schemas are too long.
    """
    calls = "call" + (r' ("\n" call)*' if several else "")
    schema = {} if schema is True else schema
    layout = {"x-guidance": {"whitespace_flexible": False}}
    text = json.dumps({**layout, **schema} if isinstance(schema, dict) else schema)
    rules = [f"start: {calls} | response", f"response: %json {text}", "call: mark_0 in_call"]
    return _guided([*rules, *_rules(tools, schemas_of(tools))], "offered with a format of the response")


def calls_or_words(tools: Sequence[Tool], *, several: bool) -> Guided:
    """Return a grammar of words and calls of these tools; a strict tool's arguments match its schema.

    `several` allows more than one call.

    Raises:
        FieldError: the schemas are too long.
    """
    start = "start: " + ("call* without_mark_0" if several else "call | without_mark_0")
    schemas = schemas_of(tools)
    schemas = [
        schema if tool.function.strict or schema is NO_ARGUMENTS else {}
        for tool, schema in zip(tools, schemas, strict=True)
    ]
    return _guided([start, "call: to_mark_0 in_call", *_rules(tools, schemas)], "strict")


def schemas_of(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return the schema of each tool's arguments. As in OpenAI's API, a tool without parameters has no arguments.

    An object has no properties but those that its schema names, unless the schema says something about others. A small
    model would invent properties, and repeat names until its limit of tokens.
    """
    return [_arguments_of(tool.function.parameters or {"properties": {}}) for tool in tools]


def _arguments_of(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a tool's JSON schema with no further properties allowed; schemas that combine others stay as they are."""
    if schema.get("properties") == {} and schema.keys() <= ANNOTATED:
        return NO_ARGUMENTS
    text = json.dumps(schema)
    return schema if any(f'"{key}":' in text for key in COMBINING) else _closed(schema)


def _closed(schema: Any) -> Any:
    """Return a schema whose objects, and those in their properties and items, have only the properties it names."""
    if not isinstance(schema, dict):
        return schema
    changed = dict(schema)
    if isinstance(properties := schema.get("properties"), dict):
        changed["properties"] = {name: _closed(value) for name, value in properties.items()}
        if properties and schema.keys() <= ANNOTATED:
            changed["additionalProperties"] = False
    if isinstance(schema.get("items"), dict):
        changed["items"] = _closed(schema["items"])
    return changed


def _rules(tools: Sequence[Tool], schemas: Sequence[dict[str, Any]]) -> list[str]:
    """Return the rules of a call. Every function has its own rule, so that `$ref` in its schema keeps its meaning."""
    functions = " | ".join(f"call_{number}" for number in range(len(tools)))
    rules = [rf'in_call: "\n" ({functions}) "\n" mark_1']
    for number, (tool, schema) in enumerate(zip(tools, schemas, strict=True)):
        opening = json.dumps(f'{{"name": {json.dumps(tool.function.name)}, "arguments": ')
        rules.append(f'call_{number}: {opening} arguments_{number} "}}"')
        arguments = {"type": "object", **with_real_dates(schema), **LAYOUT}
        rules.append(f"arguments_{number}: %json {json.dumps(arguments)}")
    return rules


def _guided(rules: list[str], what: str) -> Guided:
    """Return the guide of these grammar rules. FieldError if they are too long for tools that are `what`."""
    try:
        return Guided(grammar="\n".join(rules), marks=(CALL_START, CALL_END))
    except FieldError as error:
        raise FieldError("tools", f"tools are too long to be {what}: {error}") from error
