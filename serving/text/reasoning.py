"""What a model thinks before it responds, taken out of its text."""

from dataclasses import dataclass

from sharp.serving.text.stop_condition import longest_start_at_end


@dataclass(frozen=True)
class ReasoningForm:
    """How thoughts are marked.

    Attributes:
        start: the mark before them.
        end: the mark after them.
        inside: a completion begins inside a thought, without the mark.
        special_tokens: the marks are special tokens, which a text has on request only.
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
    """Splits a growing text into a thought and the content after it."""

    def __init__(self, form: ReasoningForm, prompt: str = "") -> None:
        """`prompt` is what the text follows: it may have begun a thought, or ended an empty one."""
        self._form = form
        before = prompt.rstrip()
        inside = before.endswith(form.start) or form.inside
        self._state = "content" if before.endswith(form.end) else "thought" if inside else "start"
        self._marked = False  # the mark that begins a thought has come
        self._thought = self._content = False  # a part of each was returned
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """Add `text`; return what is surely a part of the thought, and of the content."""
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
            if self._thought and not self._content:  # the lines between them are a part of neither
                content = content.lstrip("\n")
            self._content = self._content or bool(content)
        return thought, content

    def _take_thought(self) -> str:
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
        certain = self._held[: len(self._held) - keep].rstrip("\n")  # lines at the end are no part of it
        self._held = self._held[len(certain) :]
        self._thought = self._thought or bool(certain)
        return certain

    def end(self) -> tuple[str, str]:
        """What was held back, once no more will come."""
        held, self._held = self._held, ""
        return ("", held) if self._state != "thought" else (held.rstrip("\n"), "")
