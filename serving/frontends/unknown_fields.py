"""`UnknownFields`: what happens to the fields of a request that are not known here."""

import json
import logging
import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from sharp.serving.api.errors import FieldError
from sharp.serving.api.sampling_fields import MOST_ERRORS, StrictMessage, first_error, misspelt

logger = logging.getLogger(__name__)

ERROR, WARN, IGNORE = POLICIES = ("error", "warn", "ignore")
MOST_NAMES, LONGEST_NAME = 256, 64  # that the log has, as clients may send any
MOST_PASSES = 16  # of lists only the first entry that is wrong is known
LEFT_OUT = "is not known here and is left out"
Body = TypeVar("Body", bound=StrictMessage)


class UnknownFields:
    """Reads bodies of requests. Safe to share between threads.

    A newer client sends fields that this server does not know. vLLM leaves them out; so does `warn`, which says so in
    the log once for each name, and `ignore`, which does not. What is most likely a misspelt field of this server is an
    error in all but `ignore`.
    """

    def __init__(self, policy: str) -> None:
        """`policy` is "error", "warn" or "ignore"."""
        self._policy = policy
        self._named: set[str] = set()

    def parse(self, kind: type[Body], body: bytes) -> Body:
        """The checked body of a request.

        Raises:
            FieldError: a field is missing, of another type, or unknown where that is an error.
        """
        for _ in range(MOST_PASSES):
            try:
                return kind.model_validate_json(body)
            except ValidationError as error:
                body = self._without_unknown(kind, body, error)
        return kind.model_validate_json(body, extra="ignore")

    def _without_unknown(self, kind: type[Body], body: bytes, error: ValidationError) -> bytes:
        """A body without the fields that an error names, where all that is wrong is that they are not known."""
        known = kind.model_fields
        if self._policy == ERROR or error.error_count() > MOST_ERRORS:
            raise first_error(error, known) from error
        found = error.errors(include_url=False, include_input=False, include_context=False)
        paths = [one["loc"] for one in found if one["type"] == "extra_forbidden"]
        if len(paths) < len(found):
            raise first_error(error, unknown=False) from error
        if self._policy == WARN and any(len(path) == 1 and misspelt(str(path[0]), known) for path in paths):
            raise first_error(error, known) from error
        value = json.loads(body)
        for path in paths:
            _remove(value, path)
        self.note((".".join(str(part) for part in path) for path in paths), LEFT_OUT)
        return json.dumps(value).encode()

    def leave_out(self, names: Iterable[str], known: Sequence[str]) -> None:
        """Leave out fields of these names, which are none of the `known`.

        Raises:
            FieldError: one is an error, or most likely misspelt.
        """
        for name in sorted(names):
            near = misspelt(name, known)
            if self._policy == ERROR or (self._policy == WARN and near):
                hint = f"did you mean {near}?" if near else f"known are {', '.join(known)}"
                raise FieldError(name, f"parameter {name!r:.{LONGEST_NAME}} is not known here; {hint}")
            self.note((name,), LEFT_OUT)

    def note(self, names: Iterable[str], what: str) -> None:
        """Say in the log what happens to fields of these names, once for each."""
        if self._policy == IGNORE:
            return
        for name in names:
            field = re.sub(r"\.\d+(?=\.|$)", "", name)[:LONGEST_NAME]  # of tools.0.x and tools.1.x
            if field not in self._named and len(self._named) < MOST_NAMES:
                self._named.add(field)
                logger.warning("the field %r of a request %s", field, what)


def _remove(value: Any, path: Sequence[int | str]) -> None:
    """Take the field at a path out of what JSON holds: out of every entry of a list, as the others have it too."""
    if isinstance(value, list):
        for entry in value:
            _remove(entry, path[1:] if isinstance(path[0], int) else path)
    elif isinstance(value, dict) and len(path) == 1:
        value.pop(path[0], None)
    elif isinstance(value, dict) and path[0] in value:
        _remove(value[path[0]], path[1:])
    elif len(path) > 1:  # pydantic's name of one of several types
        _remove(value, path[1:])
