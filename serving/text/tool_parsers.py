"""Parsers of tool calls in the formats of Llama 3, Mistral and Python."""

import ast
import re

from sharp.serving.text.stop_condition import longest_start_at_end
from sharp.serving.text.tool_calls import (
    CALL_START,
    DECODER,
    ToolCall,
    ToolCallParser,
    call_of,
    json_text,
    read_calls,
    take_calls,
)

MOST_PYTHON_CHARACTERS = 2**16  # limit, because Python's parser takes much more memory than the text
PYTHON_TAG, TOOL_CALLS = "<|python_tag|>", "[TOOL_CALLS]"
DOTTED_NAME = re.compile(r"\w+(\.\w+)*")


class WholeTextParser(ToolCallParser):
    """A parser for completions that consist only of calls. Text is held back as long as it can become calls."""

    starts: tuple[str, ...] = ()  # possible beginnings of a completion of calls

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Add `text` and return the text that cannot become calls. The calls themselves are found by `end`."""
        self._held += text
        begun = self._held.lstrip()
        possible = any(start.startswith(begun) or begun.startswith(start) for start in self.starts)
        if self._shown or not possible:
            self._shown = True
            text, self._held = self._held, ""
            return text, []
        return "", []

    def end(self, *, cut: bool = False) -> str:
        """Put the calls into `calls`, or return the held-back text if it has none. Drop an unfinished call if `cut`."""
        held, self._held = self._held, ""
        calls = [] if not held.strip() else self.read(held.strip())
        self.calls = calls if self._several else calls[:1]
        return "" if self.calls or (cut and held.strip()) else held

    def read(self, text: str) -> list[ToolCall]:
        """Return the calls that make up the whole text, or none if the text is anything else."""
        raise NotImplementedError


class WholeHermesParser(ToolCallParser):
    """Calls in the format of Hermes, if the completion begins with a call. Any other completion is text as a whole."""

    _begun = False

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Add `text`. Return the text that cannot be part of a call, and the calls that are now complete."""
        if self._begun:
            return super().push(text)
        if self._shown:
            return text, []
        self._held, text = "", self._held + text
        start = text.lstrip()
        if CALL_START.startswith(start) and start != CALL_START:
            self._held = text
            return "", []
        self._begun = start.startswith(CALL_START)
        self._shown = not self._begun
        return self.push(text)


class Llama3Parser(WholeTextParser):
    """Calls `{"name": ..., "parameters": {...}}`, separated by semicolons, perhaps after `<|python_tag|>`."""

    starts = ('{"name"', '{ "name"', "{\n", '{"type"', '{"function"', '{"parameters"', PYTHON_TAG)

    def read(self, text: str) -> list[ToolCall]:
        """Return the calls of a text of JSON objects, or none if an object is not a call."""
        return read_calls(text.removeprefix(PYTHON_TAG))


class PythonicParser(WholeTextParser):
    """Calls `[weather(city="Oslo"), time()]`: a list of Python calls with literals as arguments."""

    starts = ("[",)

    def read(self, text: str) -> list[ToolCall]:
        """Return the calls of a text that is a Python list of calls, or none for any other text."""
        if len(text) > MOST_PYTHON_CHARACTERS:
            return []
        try:
            tree = ast.parse(text, mode="eval").body
            return [self._call(node) for node in tree.elts] if isinstance(tree, ast.List) else []
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            return []

    @staticmethod
    def _call(node: ast.expr) -> ToolCall:
        """Return a call in Python's syntax, whose arguments are named literals. ValueError for anything else."""
        if not isinstance(node, ast.Call) or node.args or not DOTTED_NAME.fullmatch(name := ast.unparse(node.func)):
            raise ValueError("no call of a name with named arguments")
        arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
        if None in arguments or len(arguments) < len(node.keywords):
            raise ValueError("arguments in **, or a name that stands twice")
        return ToolCall(name, json_text(arguments))


class MistralParser(ToolCallParser):
    """Calls after `[TOOL_CALLS]`: `[{"name": ..., "arguments": {...}}]` or, in newer models, a `name{...}` each."""

    special_tokens = True  # [TOOL_CALLS] is a special token, which decoding leaves out unless requested

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Add `text` and return the text before the mark `[TOOL_CALLS]`. The calls themselves are found by `end`."""
        self._held += text
        start = self._held.find(TOOL_CALLS)
        keep = len(self._held) - start if start >= 0 else longest_start_at_end(self._held, TOOL_CALLS)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown, []

    def end(self, *, cut: bool = False) -> str:
        """Put the calls into `calls`. Return the held-back text that is no call; drop an unfinished call if `cut`."""
        held, self._held = self._held, ""
        if not held.startswith(TOOL_CALLS):
            # a text that is cut off must not end with the beginning of a mark
            return "" if cut and len(held) > 1 else held
        shown, parts = "", held.split(TOOL_CALLS)[1:]
        for number, part in enumerate(parts, 1):
            calls, rest = self._take(part.strip())
            self._add(calls)
            if calls:
                shown += rest
            elif not cut or number < len(parts):
                shown += TOOL_CALLS + part
        return shown

    @staticmethod
    def _take(text: str) -> tuple[list[ToolCall], str]:
        """Return the calls at the beginning of the text after a mark, and the text after these calls."""
        if text.startswith(("[{", "{")):
            return take_calls(text)
        start = max(0, text.find("{"))
        try:
            arguments, end = DECODER.raw_decode(text, start)
        except (ValueError, RecursionError):
            return [], text
        name = text[:start].split("[")[0].strip()  # some models write [CALL_ID] and [ARGS] after the name
        call = call_of({"name": name, "arguments": arguments})
        return ([], text) if call is None else ([call], text[end:])
