"""`AnswerText`: the text of an answer, token by token, and where it ends."""

from sharp.serving.text.detokenizer import Detokenizer
from sharp.serving.text.stop_strings import StopStrings
from sharp.serving.text.tokenizer import Tokenizer


class AnswerText:
    """Turns generated tokens into the text to show; a model without a tokenizer shows none."""

    def __init__(
        self, tokenizer: Tokenizer | None, stop: tuple[str, ...], before: int, *, show_stop: bool = False
    ) -> None:
        """The first token follows the token `before`; with `show_stop` the text has the stop string that ends it."""
        self._detokenizer = Detokenizer(tokenizer, before) if tokenizer else None
        self._stop_strings = StopStrings(stop, shown=show_stop)

    def push(self, token_id: int, *, may_stop: bool) -> tuple[str, str | None]:
        """Add a token; return the text to show now, and the stop string that was found."""
        text = self._detokenizer.push(token_id) if self._detokenizer else ""
        return self._stop_strings.push(text) if may_stop else (text, None)

    def end(self) -> tuple[str, str | None]:
        """The text that was held back, once no token will come, and the stop string that was found in it."""
        text, matched = self._stop_strings.push(self._detokenizer.flush() if self._detokenizer else "")
        return (text, matched) if matched is not None else (text + self._stop_strings.flush(), None)
