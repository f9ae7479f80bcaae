"""`ReasoningParser`: separates a model's reasoning from the content of its message."""

from dataclasses import dataclass

from sharp.serving.text.stop_condition import longest_start_at_end


@dataclass(frozen=True)
class ReasoningForm:
    """The marks around a model's reasoning.

    Attributes:
        start: the mark before the reasoning.
        end: the mark after the reasoning.
        inside: a completion begins inside the reasoning, without `start`.
        special_tokens: the marks are special tokens, which decoding leaves out unless requested.
    """

    start: str
    end: str
    inside: bool = False
    special_tokens: bool = False


FORMS = {
    "deepseek_r1": ReasoningForm("<think>", "</think>", inside=True),
    "qwen3": ReasoningForm("<think>", "</think>"),
    "mistral": ReasoningForm("[THINK]", "[/THINK]", special_tokens=True),
}


class ReasoningParser:
    """A parser that splits a growing text into reasoning and the content after it."""

    def __init__(self, form: ReasoningForm, prompt: str = "") -> None:
        """Parse the text that follows `prompt`, which may end inside the reasoning, or with an empty reasoning."""
        self._form = form
        before = prompt.rstrip()
        inside = before.endswith(form.start) or form.inside
        self._state = "content" if before.endswith(form.end) else "thought" if inside else "start"
        self._marked = False  # the mark that begins the reasoning was found
        self._thought = self._content = False  # whether a part of each was returned
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """Add `text`. Return the text that certainly belongs to the reasoning, and to the content."""
        self._held += text
        if self._state == "start":
            begun, start = self._held.lstrip(), self._form.start
            if start.startswith(begun) and begun != start:
                return "", ""
            self._state = "thought" if begun.startswith(start) else "content"
        thought = self._take_thought() if self._state == "thought" else ""
        content = ""
        if self._state == "content":
            content, self._held = self._held, ""
            if self._thought and not self._content:  # blank lines between reasoning and content belong to neither
                content = content.lstrip("\n")
            self._content = self._content or bool(content)
        return thought, content

    def _take_thought(self) -> str:
        """Return the part of the held text that surely belongs to the thought; at its end mark go on with content."""
        if not self._thought:
            begun, start = self._held if self._marked else self._held.lstrip(), self._form.start
            if not self._marked and start.startswith(begun) and begun != start:
                return ""
            if not self._marked and begun.startswith(start):
                self._marked = True
                begun = begun.removeprefix(start)
            self._held = begun.lstrip("\n")
        end = self._held.find(self._form.end)
        if end >= 0:
            thought, self._held = self._held[:end].rstrip("\n"), self._held[end + len(self._form.end) :]
            self._state = "content"
            self._thought = True
            return thought
        keep = longest_start_at_end(self._held, self._form.end)
        # blank lines at the end do not belong to the reasoning
        certain = self._held[: len(self._held) - keep].rstrip("\n")
        self._held = self._held[len(certain) :]
        self._thought = self._thought or bool(certain)
        return certain

    def end(self) -> tuple[str, str]:
        """Return the held-back text after the last `push`, as reasoning and content."""
        held, self._held = self._held, ""
        return ("", held) if self._state != "thought" else (held.rstrip("\n"), "")
