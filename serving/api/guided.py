"""`Guided`: the schema, expression or grammar that a completion must match."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sharp.serving.api.errors import FieldError

MAX_CHARACTERS = 65536


@dataclass(frozen=True)
class Guided:
    """Exactly one of a JSON schema, a regular expression and a grammar. Values are checked at creation.

    Attributes:
        json: a JSON schema, as text or as an object from `json.loads`; stored as text.
        regex: a regular expression that the whole completion matches.
        grammar: a Lark grammar with the rule `start`.
        marks: texts that many models have a token for, such as `<tool_call>`. For the first mark the grammar can use
            the rules `mark_0`, `to_mark_0` (any text up to and including the mark) and `without_mark_0` (a text without
            the mark).

    Raises:
        FieldError: none or several are set, or the value is too long or not a text.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    grammar: str | None = None
    marks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.json is not None and not isinstance(self.json, str):
            try:
                object.__setattr__(self, "json", json.dumps(self.json))
            except (TypeError, ValueError) as error:
                raise FieldError("guided.json", f"guided.json cannot be written as JSON: {error}") from error
        given = {name: text for name in ("json", "regex", "grammar") if (text := getattr(self, name)) is not None}
        if len(given) != 1:
            names = " and ".join(given) or "nothing"
            raise FieldError("guided", f"guided has {names}; set exactly one of json, regex and grammar")
        for name, text in given.items():
            if not isinstance(text, str) or not text:
                raise FieldError(f"guided.{name}", f"guided.{name} is {text!r}; it must be a text")
            if len(text) > MAX_CHARACTERS:
                message = f"guided.{name} has {len(text)} characters; the limit is {MAX_CHARACTERS}"
                raise FieldError(f"guided.{name}", message)

    @property
    def kind(self) -> str:
        """The name of the field that is set: "json", "regex" or "grammar"."""
        return "json" if self.json is not None else "regex" if self.regex is not None else "grammar"

    @property
    def text(self) -> str:
        """The text of the schema, expression or grammar."""
        return str(getattr(self, self.kind))
