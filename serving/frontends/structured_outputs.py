"""vLLM's structured output: `structured_outputs`, the older `guided_*`, and OpenAI's `response_format`."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from llguidance import StructTag
from llguidance.gbnf_to_lark import any_to_lark
from pydantic import ConfigDict, Field

from sharp.serving.api.errors import FieldError
from sharp.serving.api.guided import MAX_CHARACTERS, Guided
from sharp.serving.api.sampling_fields import Flag, StrictMessage, one_of

MOST_CHOICES = 1024
MOST_TAGS = 256  # 10,000 held the event loop for 4.6 s
TAG_FORM = '{"structures": [{"begin", "schema", "end"}], "triggers": [...]}'
NESTED = ("structured_outputs", "guided_decoding")  # the latter is the older name
JsonSchema = Annotated[dict[str, Any] | str | bool | None, one_of("a JSON schema, or the text of one")]


class StructuredOutputs(StrictMessage):
    """What a completion must match: one of the first six."""

    json_: JsonSchema = None
    regex: str | None = None
    choice: Annotated[list[str], Field(max_length=MOST_CHOICES)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Annotated[dict[str, Any] | str | None, one_of("a structural tag, or the text of one")] = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: Flag = False
    disable_additional_properties: Flag = False
    disable_fallback: Flag = False

    model_config = ConfigDict(alias_generator=lambda name: name.rstrip("_"))

    @property
    def given(self) -> list[str]:
        """Which of them are set."""
        names = ("json_", "regex", "choice", "grammar", "structural_tag")
        given = [name for name in names if getattr(self, name) is not None]
        return given + (["json_object"] if self.json_object else [])

    def guide(self) -> Guided | None:
        """The same as `Guided`; None where `json_object` is false.

        Raises:
            FieldError: none or several are set, or one cannot be used.
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
        """The schema with what the request says of its layout."""
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
    """The format of the completion."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None

    def guide(self) -> Guided | None:
        """The same as `Guided`; None for text.

        Raises:
            FieldError: it has no schema.
        """
        if self.type == "text":
            return None
        if self.type == "json_object":
            return Guided(json={"type": "object"})
        if self.type == "structural_tag":
            return structural_tag({"structures": self.structures, "triggers": self.triggers, "format": self.format})
        schema = (self.json_schema or {}).get("schema")
        if schema is None:
            raise FieldError("response_format", "response_format.json_schema has no schema")
        return Guided(json=schema)


class StructuredFields(StrictMessage):
    """The fields of a request that say what its completion must match, besides `guided`."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_decoding: StructuredOutputs | None = None
    guided_json: JsonSchema = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(max_length=MOST_CHOICES)] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_whitespace_pattern: str | None = None
    structural_tag: Annotated[dict[str, Any] | str | None, one_of("a structural tag, or the text of one")] = None

    @property
    def structure_fields(self) -> list[str]:
        """Which of them are set."""
        older = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag")
        names = [name for name in older if getattr(self, name) is not None]
        names += ["guided_json_object"] if self.guided_json_object else []
        for name in NESTED:
            nested = getattr(self, name)
            names += [name] if nested is not None and (nested.given or nested.json_object is None) else []
        formatted = self.response_format is not None and self.response_format.type != "text"
        return names + (["response_format"] if formatted else [])

    def structure(self) -> Guided | None:
        """What they say.

        Raises:
            FieldError: several are set, or one cannot be used.
        """
        names = self.structure_fields
        if not names:
            return None
        if len(names) > 1:
            raise FieldError(names[0], f"{' and '.join(names)} are both set; set one of them")
        if self.response_format is not None and names == ["response_format"]:
            return self.response_format.guide()
        if names[0] in NESTED:
            nested: StructuredOutputs = getattr(self, names[0])
            return nested.guide()
        older: dict[str, Any] = {
            "json": self.guided_json,
            "regex": self.guided_regex,
            "choice": self.guided_choice,
            "grammar": self.guided_grammar,
            "json_object": self.guided_json_object,
            "structural_tag": self.structural_tag,
            "whitespace_pattern": self.guided_whitespace_pattern,
        }
        return StructuredOutputs.model_validate(older).guide()


def choice_grammar(choices: list[str]) -> str:
    """A grammar of a few texts.

    Raises:
        FieldError: there is none, or one is empty.
    """
    if not choices or not all(choices):
        raise FieldError("guided.choice", f"guided.choice is {choices!r:.80}; it must have texts, none of them empty")
    return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def lark(grammar: str) -> str:
    """A grammar of llama.cpp (GBNF) or of EBNF with `::=` as one of Lark; one of Lark as it is.

    Raises:
        FieldError: it cannot be read.
    """
    if "::=" not in grammar or len(grammar) > MAX_CHARACTERS:
        return grammar
    try:
        return str(any_to_lark(grammar))
    except Exception as error:  # the library's own, and whatever its parser meets
        raise FieldError("guided.grammar", f"guided.grammar cannot be used: {error}"[:300]) from error


def structural_tag(tag: Mapping[str, Any]) -> Guided:
    """Words, and after each trigger a text that the schema of its structure allows.

    Raises:
        FieldError: it is of another form.
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
    """The structures of a tag, of vLLM's older form or of the `format` triggered_tags.

    Raises:
        ValueError: they are not supported, too many, or none.
    """
    triggers, structures = tag.get("triggers"), tag.get("structures")
    if form:
        if form.get("type") != "triggered_tags":
            raise ValueError(f"the format {form.get('type')!r:.40} is not supported")
        for name in ("at_least_one", "stop_after_first"):
            if form.get(name):
                raise ValueError(f"{name} is not supported")
        triggers = form["triggers"]
        structures = [{**one, "schema": one["content"]["json_schema"]} for one in form["tags"]]
    if not structures:
        raise ValueError("it has no structures")
    if max(len(triggers or ()), len(structures)) > MOST_TAGS:
        raise ValueError(f"it has more than {MOST_TAGS} structures or triggers")
    return [
        StructTag(
            trigger=next(trigger for trigger in triggers or () if one["begin"].startswith(trigger)),
            begin=one["begin"],
            grammar=one.get("schema") or {},
            end=one["end"],
        )
        for one in structures
    ]


def closed(schema: Any) -> Any:
    """A schema whose objects have no other properties than those it names."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: closed(value) for name, value in schema.items()}
    named = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    return {"additionalProperties": False, **inner} if named else inner


def _object(value: Any, name: str) -> dict[str, Any]:
    """What may come as a text of JSON."""
    try:
        value = json.loads(value) if isinstance(value, str) and len(value) <= MAX_CHARACTERS else value
    except (ValueError, RecursionError) as error:
        raise FieldError(f"guided.{name}", f"guided.{name} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise FieldError(f"guided.{name}", f"guided.{name} must be a JSON object")
    return value
