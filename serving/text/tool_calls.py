"""Tool calls in the text of a completion: calls in JSON of all formats, and the parser of Hermes' and Qwen's format."""

import json
import math
import uuid
from dataclasses import dataclass, field
from typing import Any, NoReturn

from sharp.serving.text.stop_condition import longest_start_at_end

CALL_START, CALL_END = "<tool_call>", "</tool_call>"
ARGUMENTS = ("arguments", "parameters")  # models use either name, whichever the template shows
SEPARATORS = ",; \n\r\t"  # characters that may stand between calls
# The keys that a call may have beside name and arguments. The value of any other key would be lost.
HARMLESS = {"id", "call_id", "index", "type"}


@dataclass(frozen=True)
class ToolCall:
    """A tool call. `arguments` is a JSON text, of an object unless the model wrote something else."""

    name: str
    arguments: str
    call_id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")


class ToolCallParser:
    """A parser of calls in a growing text: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`.

    Anything between the marks that is not a call stays in the text. A mark within a string of the call belongs to the
    string. Unless `several` are allowed, only the first call counts.
    """

    special_tokens = False  # whether the marks are special tokens, which decoding leaves out unless requested

    def __init__(self, *, several: bool = True) -> None:
        self._several = several
        self._shown = False
        self.calls: list[ToolCall] = []
        self._held = ""
        # This many characters of the unfinished call were searched; they have end marks within strings only.
        self._inside = 0

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Add `text`. Return the text that cannot be part of a call, and the calls that are now complete."""
        self._held += text
        shown: list[str] = []
        known = len(self.calls)
        while (start := self._held.find(CALL_START)) >= 0:
            end = self._held.find(CALL_END, start + self._inside)
            if end < 0:
                break
            text = self._held[start + len(CALL_START) : end]
            if _ends_in_string(text):
                self._inside = end + len(CALL_END) - start
                continue
            calls = read_calls(text)
            if not calls:
                end = self._held.find(CALL_END, start)
            end += len(CALL_END)
            whole, self._held, self._inside = self._held[:end], self._held[end:], 0
            shown.append(whole[:start].rstrip() if calls else whole)
            self._add(calls)
        keep = len(self._held) - start if start >= 0 else longest_start_at_end(self._held, CALL_START)
        certain = self._held[: len(self._held) - keep]
        # Trailing blanks are held back, because they are dropped if a call follows.
        waiting = keep + len(certain) - len(certain.rstrip())
        shown.append(self._held[: len(self._held) - waiting])
        self._held = self._held[len(self._held) - waiting :]
        return "".join(shown), self.calls[known:]

    def _add(self, calls: list[ToolCall]) -> None:
        """Keep new calls; of all calls only the first, if the format has but one."""
        self.calls += calls if self._several or not self.calls else []
        if not self._several:
            del self.calls[1:]

    def end(self, *, cut: bool = False) -> str:
        """Return the held-back text after the last `push`. If the text was `cut` off, drop an unfinished call.

        Some models end a completion right after the JSON of a call, without an end mark. Such a call counts.
        """
        held, self._held = self._held, ""
        start = held.find(CALL_START)
        if start >= 0:
            calls = read_calls(held[start + len(CALL_START) :])
            self._add(calls)
            if calls or cut:
                return held[:start].rstrip()
        elif cut and len(held.strip()) > 1 and CALL_START.startswith(held.strip()):
            return ""
        return held if held.strip() or not self.calls else ""


def _ends_in_string(text: str) -> bool:
    """Whether `text` is an incomplete JSON text that ends inside a string."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string")
    except RecursionError:
        pass
    return False


def read_calls(text: str) -> list[ToolCall]:
    """Return the calls that make up the whole text, or none if the text has anything else, which would be lost."""
    calls, rest = take_calls(text)
    return [] if rest else calls


def take_calls(text: str) -> tuple[list[ToolCall], str]:
    """Return the calls at the beginning of a text, and the text after these calls.

    Calls are JSON objects, or lists of JSON objects, separated by blanks, commas or semicolons.
    """
    calls: list[ToolCall] = []
    place = len(text) - len(text.lstrip(SEPARATORS))
    while place < len(text):
        try:
            value, end = DECODER.raw_decode(text, place)
        except (ValueError, RecursionError):
            break
        found = [call_of(entry) for entry in (value if isinstance(value, list) else [value])]
        new = [call for call in found if call is not None]
        if len(new) < len(found):
            break
        calls += new
        place = end + len(text[end:]) - len(text[end:].lstrip(SEPARATORS))
    return calls, text[place:]


def call_of(value: Any) -> ToolCall | None:
    """Return the tool call that a JSON object describes, or None if it describes none or has other keys."""
    if not isinstance(value, dict):
        return None
    function, beside = value.get("function"), {name: entry for name, entry in value.items() if name != "function"}
    if isinstance(function, dict):  # as OpenAI's API writes calls
        if beside.keys() - HARMLESS:
            return None
        value = function
    elif "function" in value:
        if "name" in beside:
            return None
        value = {"name": function, **beside}
    given = [name for name in ARGUMENTS if name in value]
    name, arguments = value.get("name"), value[given[0]] if given else None
    if not isinstance(name, str) or not name.strip() or len(given) > 1 or value.keys() - HARMLESS - {"name", *given}:
        return None
    if isinstance(arguments, str) and isinstance(inner := read_json(arguments), dict):
        arguments = inner  # some models encode arguments twice
    if not isinstance(arguments, dict | str | None):
        return None
    try:
        name.encode()
        return ToolCall(name, json_text(arguments or {}))
    except (ValueError, RecursionError):
        return None


def json_text(value: Any) -> str:
    """Return `value` as JSON that every client can read.

    Raises:
        ValueError: the value has NaN, an infinity, or half of a surrogate pair, which strict parsers refuse.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()
    return text


def read_json(text: str) -> Any:
    """Return the value that a JSON text describes, or the text itself if it is no JSON."""
    try:
        value, end = DECODER.raw_decode(text.strip())
    except (ValueError, RecursionError):
        return text
    return value if end == len(text.strip()) else text


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object from its pairs. Refuse a name that stands twice, because a value would be lost.

    Raises:
        ValueError: a name stands twice.
    """
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a name stands twice in an object")
    return found


def _refuse(text: str) -> NoReturn:
    """Raise ValueError for NaN and Infinity, which JSON does not have."""
    raise ValueError(f"{text} is no number of JSON")


def _finite(text: str) -> float:
    """Return the number of a text. ValueError if it is too large for a float."""
    if not math.isfinite(number := float(text)):
        _refuse(text)
    return number


DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite)
