"""Stop strings in a text that arrives in pieces."""


class StopStrings:
    """Finds the first of some strings in a growing text and holds back what may become one."""

    def __init__(self, strings: tuple[str, ...], *, shown: bool = False) -> None:
        """The string that is found is a part of the text if it is to be `shown`."""
        self._strings = strings
        self._shown = shown
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Add `text`; return the text that is safe to show now, and the stop string that was found.

        The text that is shown ends before the stop string, or with it. Of two that are found at once, the one that
        starts earlier counts, then the one that was listed first.
        """
        if not self._strings:
            return text, None
        self._held += text
        found = [(start, string) for string in self._strings if (start := self._held.find(string)) >= 0]
        if found:
            start, string = min(found, key=lambda match: match[0])
            return self._held[: start + len(string) if self._shown else start], string
        keep = max(longest_start_at_end(self._held, string) for string in self._strings)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown, None

    def flush(self) -> str:
        """The text that was held back, once no more will come."""
        held, self._held = self._held, ""
        return held


def longest_start_at_end(text: str, string: str) -> int:
    """The length of the longest proper start of `string` that `text` ends with."""
    return next((n for n in range(min(len(string) - 1, len(text)), 0, -1) if text.endswith(string[:n])), 0)
