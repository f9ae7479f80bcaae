"""vLLM's structured output: `structured_outputs`, the older `guided_*`, and OpenAI's `response_format`."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from llguidance import StructTag
from llguidance.gbnf_to_lark import any_to_lark
from pydantic import ConfigDict, Field

from sharp.serving.api.errors import FieldError
from sharp.serving.api.guided import MAX_CHARACTERS, Guided
from sharp.serving.frontends.json_fields import Flag, StrictMessage, one_of

MOST_CHOICES = 1024
MOST_TAGS = 256  # 10,000 tags blocked the event loop for 4.6 s
TAG_FORM = '{"structures": [{"begin", "schema", "end"}], "triggers": [...]}'
NESTED = ("structured_outputs", "guided_decoding")  # guided_decoding is vLLM's older name
JsonSchema = Annotated[dict[str, Any] | str | bool | None, one_of("a JSON schema, or the text of one")]
StructuralTag = Annotated[dict[str, Any] | str | None, one_of("a structural tag, or the text of one")]


class StructuredOutputs(StrictMessage):
    """The format that a completion must match; exactly one of the first six fields is set."""

    json_: JsonSchema = None
    regex: str | None = None
    choice: Annotated[list[str], Field(max_length=MOST_CHOICES)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: StructuralTag = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: Flag = False
    disable_additional_properties: Flag = False
    disable_fallback: Flag = False

    model_config = ConfigDict(alias_generator=lambda name: name.rstrip("_"))

    @property
    def given(self) -> list[str]:
        """The names of the fields that are set and say what to match."""
        names = ("json_", "regex", "choice", "grammar", "structural_tag")
        given = [name for name in names if getattr(self, name) is not None]
        return given + (["json_object"] if self.json_object else [])

    def guide(self) -> Guided | None:
        """Return these fields as a `Guided`; None if `json_object` is false.

        Raises:
            FieldError: none or several of the fields are set, or a value cannot be used.
        """
        given = self.given
        if len(given) > 1:
            names = " and ".join(name.rstrip("_") for name in given)
            raise FieldError("structured_outputs", f"structured_outputs has {names}; set one of them")
        if not given and self.json_object is None:
            kinds = "json, regex, choice, grammar, json_object or structural_tag"
            raise FieldError("structured_outputs", f"structured_outputs says nothing to match; set {kinds}")
        if not given:
            return None
        if self.choice is not None:
            return Guided(grammar=choice_grammar(self.choice))
        if self.regex is not None:
            return Guided(regex=self.regex)
        if self.grammar is not None:
            return Guided(grammar=lark(self.grammar))
        if self.structural_tag is not None:
            return structural_tag(_object(self.structural_tag, "structural_tag"))
        return Guided(json=self._schema({"type": "object"} if self.json_ is None else self.json_))

    def _schema(self, schema: Any) -> Any:
        """Return a schema with the request's settings of white space and additional properties."""
        layout = {
            **({"whitespace_flexible": False} if self.disable_any_whitespace else {}),
            **({"whitespace_pattern": self.whitespace_pattern} if self.whitespace_pattern is not None else {}),
        }
        if not layout and not self.disable_additional_properties:
            return schema
        schema = _object(schema, "json")
        if self.disable_additional_properties:
            schema = closed(schema)
        return {**schema, "x-guidance": layout} if layout else schema


class ResponseFormat(StrictMessage):
    """The field `response_format` of a request: free text, JSON, JSON of a schema, or structures in free text."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None

    def guide(self) -> Guided | None:
        """Return this format as a `Guided`; None for text.

        Raises:
            FieldError: the format json_schema has no schema, or a value cannot be used.
        """
        if self.type == "text":
            return None
        if self.type == "json_object":
            return Guided(json={"type": "object"})
        if self.type == "structural_tag":
            return structural_tag({"structures": self.structures, "triggers": self.triggers, "format": self.format})
        schema = (self.json_schema or {}).get("schema")
        if schema is None:
            raise FieldError("response_format", "response_format.json_schema has no schema; add the field schema")
        return Guided(json=schema)


def choice_grammar(choices: list[str]) -> str:
    """Return a grammar, in the Lark form of llguidance, that matches exactly one of the texts.

    Raises:
        FieldError: there is no text, or a text is empty.
    """
    if not choices or not all(choices):
        raise FieldError("guided.choice", f"guided.choice is {choices!r:.80}; it must have texts, none of them empty")
    return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def lark(grammar: str) -> str:
    """Return a grammar of llama.cpp (GBNF) or of EBNF with `::=` as one of Lark, and a Lark grammar unchanged.

    Raises:
        FieldError: the grammar cannot be read.
    """
    if "::=" not in grammar or len(grammar) > MAX_CHARACTERS:
        return grammar
    try:
        return str(any_to_lark(grammar))
    except Exception as error:  # the library has errors of its own, and its parser raises others
        raise FieldError("guided.grammar", f"guided.grammar cannot be used: {error}"[:300]) from error


def structural_tag(tag: Mapping[str, Any]) -> Guided:
    """Return a grammar of free text in which the schema of a structure applies after each of its triggers.

    Raises:
        FieldError: the tag is of another form.
    """
    form = tag.get("format") or {}
    try:
        if form.get("type") == "json_schema":
            return Guided(json=form["json_schema"])
        if form.get("type") in ("regex", "grammar"):
            text = str(form.get("pattern") or form["grammar"])
            return Guided(regex=text) if form["type"] == "regex" else Guided(grammar=lark(text))
        tags = _tags(tag, form)
        return Guided(grammar=StructTag.to_grammar(tags, assume_special=False))
    except FieldError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, AssertionError, StopIteration, RuntimeError) as error:
        message = f"guided.structural_tag cannot be used: {error or 'a begin has no trigger'}; its form is {TAG_FORM}"
        raise FieldError("guided.structural_tag", message[:300]) from error


def _tags(tag: Mapping[str, Any], form: Mapping[str, Any]) -> list[StructTag]:
    """Return the structures of a tag, which is of vLLM's older form or has the `format` triggered_tags.

    Raises:
        ValueError: the structures are not supported, or there are none or too many.
    """
    triggers, structures = tag.get("triggers"), tag.get("structures")
    if form:
        if form.get("type") != "triggered_tags":
            raise ValueError(f"the format {form.get('type')!r:.40} is not supported")
        for name in ("at_least_one", "stop_after_first"):
            if form.get(name):
                raise ValueError(f"{name} is not supported")
        triggers = form["triggers"]
        structures = [{**structure, "schema": structure["content"]["json_schema"]} for structure in form["tags"]]
    if not structures:
        raise ValueError("it has no structures")
    if max(len(triggers or ()), len(structures)) > MOST_TAGS:
        raise ValueError(f"it has more than {MOST_TAGS} structures or triggers")
    return [
        StructTag(
            trigger=next(trigger for trigger in triggers or () if structure["begin"].startswith(trigger)),
            begin=structure["begin"],
            grammar=structure.get("schema") or {},
            end=structure["end"],
        )
        for structure in structures
    ]


def closed(schema: Any) -> Any:
    """Return a schema whose objects have no other properties than those that it names."""
    if isinstance(schema, list):
        return [closed(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: closed(value) for name, value in schema.items()}
    named = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    return {"additionalProperties": False, **inner} if named else inner


def _object(value: Any, name: str) -> dict[str, Any]:
    """Return a JSON object that may have come as a text of JSON.

    Raises:
        FieldError: the value is no JSON object; the message calls it `name`.
    """
    try:
        value = json.loads(value) if isinstance(value, str) and len(value) <= MAX_CHARACTERS else value
    except (ValueError, RecursionError) as error:
        raise FieldError(f"guided.{name}", f"guided.{name} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise FieldError(f"guided.{name}", f"guided.{name} must be a JSON object")
    return value
