"""Function calls in the text of a completion, in the format of Hermes and Qwen."""

import json
import uuid
from dataclasses import dataclass, field

from sharp.serving.text.stop_condition import longest_start_at_end

CALL_START, CALL_END = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ToolCall:
    """A call: `arguments` is a JSON text."""

    name: str
    arguments: str
    call_id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")


class ToolCallParser:
    """Takes the calls out of a growing text: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`.

    What stands between the marks and is no call stays text; a mark in a string of the call is a part of it. Unless
    `several` are allowed, only the first call counts.
    """

    special_tokens = False  # whether the marks are special tokens, which a text has on request only

    def __init__(self, *, several: bool = True) -> None:
        self._several = several
        self._shown = False
        self.calls: list[ToolCall] = []
        self._held = ""
        self._inside = 0  # so many characters of the call that began have marks of an end in strings only

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Add `text`; return what is surely no part of a call, and the calls that became complete."""
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
            call = _read(text)
            if call is None:
                end = self._held.find(CALL_END, start)
            end += len(CALL_END)
            whole, self._held, self._inside = self._held[:end], self._held[end:], 0
            if call is None:
                shown.append(whole)
            else:
                shown.append(whole[:start].rstrip())
                if self._several or not self.calls:
                    self.calls.append(call)
        keep = len(self._held) - start if start >= 0 else longest_start_at_end(self._held, CALL_START)
        certain = self._held[: len(self._held) - keep]
        # Blanks that end here may stand before a call: they wait, and go with it.
        waiting = keep + len(certain) - len(certain.rstrip())
        shown.append(self._held[: len(self._held) - waiting])
        self._held = self._held[len(self._held) - waiting :]
        return "".join(shown), self.calls[known:]

    def end(self, *, cut: bool = False) -> str:
        """The text that was held back, once no more will come. Of one that was `cut` off, a call that began is none.

        Some models end a completion right after the JSON of a call.
        """
        held, self._held = self._held, ""
        start = held.find(CALL_START)
        if start >= 0:
            call = _read(held[start + len(CALL_START) :])
            if call is not None and (self._several or not self.calls):
                self.calls.append(call)
            if call is not None or cut:
                return held[:start].rstrip()
        elif cut and len(held.strip()) > 1 and CALL_START.startswith(held.strip()):
            return ""
        return held if held.strip() or not self.calls else ""


def _ends_in_string(text: str) -> bool:
    """Whether `text` is JSON up to its end, and that is inside a string."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string")
    except RecursionError:
        pass
    return False


def _read(text: str) -> ToolCall | None:
    try:
        call = json.loads(text)
        name, arguments = call["name"], call.get("arguments", {})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    if not isinstance(name, str) or not isinstance(arguments, dict | str):
        return None
    return ToolCall(name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))
