"""The forms in which models write calls of tools: Llama 3's, Mistral's, and that of Python."""

import ast
import json
from typing import Any

from sharp.serving.text.stop_condition import longest_start_at_end
from sharp.serving.text.tool_calls import ToolCall, ToolCallParser

MOST_PYTHON_CHARACTERS = 2**16  # Python's parser takes much more memory than the text
PYTHON_TAG, TOOL_CALLS = "<|python_tag|>", "[TOOL_CALLS]"
DECODER = json.JSONDecoder()


class WholeTextParser(ToolCallParser):
    """Of a completion that is calls as a whole, or none at all: it is held back while it can become calls."""

    starts: tuple[str, ...] = ()  # how a completion of calls begins

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """See `ToolCallParser`; calls come at the end."""
        self._held += text
        begun = self._held.lstrip()
        possible = any(start.startswith(begun) or begun.startswith(start) for start in self.starts)
        if self._shown or not possible:
            self._shown = True
            text, self._held = self._held, ""
            return text, []
        return "", []

    def end(self, *, cut: bool = False) -> str:
        """The text that was held back and is no call. Of one that was `cut` off, what began as calls is none."""
        held, self._held = self._held, ""
        calls = [] if not held.strip() else self.read(held.strip())
        self.calls = calls if self._several else calls[:1]
        return "" if self.calls or (cut and held.strip()) else held

    def read(self, text: str) -> list[ToolCall]:
        """The calls that a whole text is; none if it is something else."""
        raise NotImplementedError


class Llama3Parser(WholeTextParser):
    """`{"name": ..., "parameters": {...}}`, several with semicolons between them, perhaps after `<|python_tag|>`."""

    starts = ('{"name"', '{ "name"', "{\n", '{"type"', '{"function"', '{"parameters"', PYTHON_TAG)

    def read(self, text: str) -> list[ToolCall]:
        """See `WholeTextParser`."""
        text, calls = text.removeprefix(PYTHON_TAG), []
        while text := text.strip("; \n\t"):
            try:
                value, end = DECODER.raw_decode(text)
            except (ValueError, RecursionError):
                return []
            call = call_of(value)
            if call is None:
                return []
            calls.append(call)
            text = text[end:]
        return calls


class PythonicParser(WholeTextParser):
    """`[weather(city="Oslo"), time()]`: a list of calls of Python with literals as arguments."""

    starts = ("[",)

    def read(self, text: str) -> list[ToolCall]:
        """See `WholeTextParser`."""
        if len(text) > MOST_PYTHON_CHARACTERS:
            return []
        try:
            tree = ast.parse(text, mode="eval").body
            return [self._call(node) for node in tree.elts] if isinstance(tree, ast.List) else []
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            return []

    @staticmethod
    def _call(node: ast.expr) -> ToolCall:
        if not isinstance(node, ast.Call) or node.args:
            raise ValueError("no call with named arguments")
        arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
        if None in [keyword.arg for keyword in node.keywords]:
            raise ValueError("arguments in **")
        return ToolCall(ast.unparse(node.func), json.dumps(arguments, ensure_ascii=False))


class MistralParser(ToolCallParser):
    """`[TOOL_CALLS]`, then `[{"name": ..., "arguments": {...}}]` or, in newer models, `name{...}` for each call."""

    special_tokens = True  # the mark is one, and no text has it otherwise

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """See `ToolCallParser`; calls come at the end."""
        self._held += text
        start = self._held.find(TOOL_CALLS)
        keep = len(self._held) - start if start >= 0 else longest_start_at_end(self._held, TOOL_CALLS)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown, []

    def end(self, *, cut: bool = False) -> str:
        """See `ToolCallParser`."""
        held, self._held = self._held, ""
        if not held.startswith(TOOL_CALLS):
            return "" if cut and len(held) > 1 else held  # the beginning of a mark, which is no text
        calls: list[ToolCall] = []
        for part in held.split(TOOL_CALLS)[1:]:
            calls += self._read(part.strip())
        self.calls = calls if self._several else calls[:1]
        return "" if self.calls or cut else held

    @staticmethod
    def _read(text: str) -> list[ToolCall]:
        try:
            if text.startswith(("[", "{")):
                values, _ = DECODER.raw_decode(text)
                calls = [call_of(value) for value in (values if isinstance(values, list) else [values])]
                return [call for call in calls if call is not None]
            start = text.index("{")
            arguments, _ = DECODER.raw_decode(text[start:])
        except (ValueError, RecursionError):
            return []
        name = text[:start].split("[")[0].strip()  # [CALL_ID] and [ARGS] of some
        call = call_of({"name": name, "arguments": arguments})
        return [] if call is None else [call]


def call_of(value: Any) -> ToolCall | None:
    """The call that a JSON object is; None if it is none."""
    if not isinstance(value, dict):
        return None
    function = value.get("function")
    value = function if isinstance(function, dict) else {"name": function, **value} if function else value
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str) or not name or not isinstance(arguments, dict | str):
        return None
    return ToolCall(name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))
