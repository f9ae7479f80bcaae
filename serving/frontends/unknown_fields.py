"""`UnknownFields`: a reader of request bodies, with a policy for fields that this server does not know."""

import json
import logging
import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic import ValidationError

from sharp.serving.api.errors import FieldError
from sharp.serving.frontends.foreign_fields import check_foreign
from sharp.serving.frontends.json_fields import RequestBody

logger = logging.getLogger(__name__)

ERROR, WARN, IGNORE = POLICIES = ("error", "warn", "ignore")
MOST_ERRORS = 1000
MOST_NAMES, LONGEST_NAME = 256, 64  # limits of what the log names, because clients may send any name
LEAST_LIKENESS = 0.85  # of a misspelt name and the known one
MOST_LISTED = 8  # known names in a message
MOST_PATH = 200  # maximum characters of a field's name in a message
MOST_PASSES = 16  # of parsing, because an error names only the first wrong entry of a list
LEFT_OUT = "is not known here and is left out"
Body = TypeVar("Body", bound=RequestBody)


class UnknownFields:
    """A reader of request bodies with a policy for unknown fields. Safe to share between threads.

    A newer client may send fields that this server does not know. vLLM leaves them out. So does the policy `warn`,
    which logs each name once, and `ignore`, which does not. The policy `error` refuses them. A field whose name is most
    likely misspelt is an error under `warn`, too.
    """

    def __init__(self, policy: str) -> None:
        """Set the policy: "error", "warn" or "ignore"."""
        self._policy = policy
        self._named: set[str] = set()

    def parse(self, kind: type[Body], body: bytes) -> Body:
        """Return the checked body of a request, without unknown fields.

        Raises:
            FieldError: a field is missing, of another type, of another server's API and cannot be honoured, or unknown
                and the policy refuses that.
        """
        request, others = self._validated(kind, body)
        unknown = others.keys() - kind.foreign.keys()
        if len(unknown) > MOST_ERRORS:
            raise _too_many_errors(len(unknown))
        self.leave_out(unknown, [*kind.model_fields, *kind.foreign])
        for name in unknown:
            del others[name]
        self.note(check_foreign(kind.foreign, others), "has no effect here")
        return request

    def _validated(self, kind: type[Body], body: bytes) -> tuple[Body, dict[str, Any]]:
        """Return a body without the unknown fields of the objects in it, and the fields that it has besides its own."""
        for _ in range(MOST_PASSES):
            try:
                request = kind.model_validate_json(body)
            except ValidationError as error:
                body = self._without_unknown(body, error)
            else:
                return request, request.model_extra or {}
        try:
            request = kind.model_validate_json(body, extra="ignore")
        except ValidationError as error:
            raise first_error(error, unknown=False) from error
        return request, {name: value for name, value in json.loads(body).items() if name not in kind.model_fields}

    def _without_unknown(self, body: bytes, error: ValidationError) -> bytes:
        """Return a body without the fields that an error names, if all that is wrong is that they are unknown."""
        if self._policy == ERROR or error.error_count() > MOST_ERRORS:
            raise first_error(error) from error
        found = error.errors(include_url=False, include_input=False, include_context=False)
        paths = [detail["loc"] for detail in found if detail["type"] == "extra_forbidden"]
        if len(paths) < len(found):
            raise first_error(error, unknown=False) from error
        value = json.loads(body)
        for path in paths:
            _remove(value, path)
        self.note((".".join(str(part) for part in path) for path in paths), LEFT_OUT)
        return json.dumps(value).encode()

    def leave_out(self, names: Iterable[str], known: Sequence[str], what: str = "{}") -> None:
        """Apply the policy to fields of these names, none of which is `known`; messages show a name as `what`.

        Raises:
            FieldError: the policy refuses a field, or its name is most likely misspelt.
        """
        for name in sorted(names):
            near = None if self._policy == IGNORE else _misspelt(name, known)
            if self._policy == ERROR or near:
                listed = f"; known are {', '.join(known)}" if len(known) <= MOST_LISTED else ""
                hint = f"; did you mean {near}?" if near else listed
                raise FieldError(name, f"{what.format(_in_a_line(name))} is not known here{hint}")
            self.note((name,), LEFT_OUT)

    def note(self, names: Iterable[str], what: str) -> None:
        """Log what happens to fields of these names, once for each name."""
        if self._policy == IGNORE:
            return
        for name in names:
            field = re.sub(r"\.\d+(?=\.|$)", "", name)[:LONGEST_NAME]  # tools.0.x and tools.1.x are one field
            if field not in self._named and len(self._named) < MOST_NAMES:
                self._named.add(field)
                logger.warning("the field %r of a request %s", field, what)


def first_error(error: ValidationError, *, unknown: bool = True) -> FieldError:
    """Return the first error that pydantic found, as a sentence. Unknown fields come last unless `unknown`."""
    # Listing more than MOST_ERRORS errors would take seconds, during which no other request is served.
    if error.error_count() > MOST_ERRORS:
        return _too_many_errors(error.error_count())
    errors = error.errors(include_url=False, include_input=False)
    first = next((found for found in errors if unknown or found["type"] != "extra_forbidden"), errors[0])
    path = _in_a_line(".".join(str(part) for part in first["loc"])) or "the body"
    what = "is not known here" if first["type"] == "extra_forbidden" else f"cannot be used: {first['msg']}"
    return FieldError(str(first["loc"][0]) if first["loc"] else "body", f"{path} {what}")


def _too_many_errors(count: int) -> FieldError:
    """Return the error for a body with `count` fields that cannot be used."""
    return FieldError("body", f"the body has {count} fields or entries that cannot be used")


def _in_a_line(path: str) -> str:
    """Return a field's path, shortened and printable, for use in a sentence. Clients choose the names in it."""
    shown = path if len(path) <= MOST_PATH else f"{path[:MOST_PATH]}..."
    return "".join(character if character.isprintable() else "\ufffd" for character in shown)


def _misspelt(name: str, known: Iterable[str]) -> str | None:
    """Return the `known` name that is most similar to `name`, or None if none is similar enough or `name` is long."""
    near = [] if len(name) > LONGEST_NAME else get_close_matches(name.lower(), known, n=1, cutoff=LEAST_LIKENESS)
    return near[0] if near else None


def _remove(value: Any, path: Sequence[int | str]) -> None:
    """Remove the field at a path from a JSON value; from every entry of a list, because any may have the field."""
    if isinstance(value, list):
        for entry in value:
            _remove(entry, path[1:] if isinstance(path[0], int) else path)
    elif isinstance(value, dict) and len(path) == 1:
        value.pop(path[0], None)
    elif isinstance(value, dict) and path[0] in value:
        _remove(value[path[0]], path[1:])
    elif len(path) > 1:  # this part of the path is pydantic's name of a type in a union
        _remove(value, path[1:])
