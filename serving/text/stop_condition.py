"""`StopCondition`: decodes the tokens of a sequence to text and finds the stop string or token that ends it."""

from sharp.serving.api.sampling_params import SamplingParams
from sharp.serving.text.detokenizer import Detokenizer
from sharp.serving.text.tokenizer import Tokenizer


class StopCondition:
    """A decoder of generated tokens that finds stop tokens and stop strings in them.

    Attributes:
        token_ids: the tokens that end the sequence.
    """

    def __init__(
        self,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        eos_token_ids: tuple[int, ...],
        last_prompt_token: int,
    ) -> None:
        """Follow a sequence whose first token comes after `last_prompt_token`. Without a tokenizer it has no text."""
        self.token_ids = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else eos_token_ids)
        # Decoding leaves out special tokens, so a stop string that is a special token is found by its id.
        self._special = tokenizer.special_tokens(params.stop) if tokenizer and params.stop else {}
        self._include_stop = params.include_stop_str_in_output
        shown = not params.skip_special_tokens
        self._detokenizer = Detokenizer(tokenizer, last_prompt_token, special_tokens=shown) if tokenizer else None
        self._strings = StopStrings(params.stop, shown=params.include_stop_str_in_output)

    def push(self, token_id: int, *, may_stop: bool) -> tuple[str, str | int | None]:
        """Add a token. Return the text that is now final, and the stop string or token that was found, or None.

        Stop strings count only if `may_stop`, which is false before `min_tokens`.
        """
        if token_id in self.token_ids or (may_stop and token_id in self._special):
            return self._stop_at(token_id)
        return self._push(token_id, may_stop=may_stop)

    def flush(self) -> tuple[str, str | None]:
        """Return the held-back text after the last token, and the stop string that was found in it, or None."""
        text, matched = self._strings.push(self._detokenizer.flush() if self._detokenizer else "")
        return (text, matched) if matched is not None else (text + self._strings.flush(), None)

    def _push(self, token_id: int, *, may_stop: bool) -> tuple[str, str | None]:
        """Return the text that a token adds, and the stop string that ended it or None.

        With `may_stop` false, stop strings do not count.
        """
        text = self._detokenizer.push(token_id) if self._detokenizer else ""
        return self._strings.push(text) if may_stop else (text, None)

    def _stop_at(self, token_id: int) -> tuple[str, str | int]:
        """Return the last text of a sequence that ends at a stop token, and its stop string, if any, or the token."""
        text, matched = self._push(token_id, may_stop=True) if self._include_stop else ("", None)
        if matched is None:
            rest, matched = self.flush()
            text += rest
        if matched is not None:
            return text, matched
        if token_id in self.token_ids:
            return text, token_id
        string = self._special[token_id]
        return (text + string if self._include_stop else text), string


class StopStrings:
    """A search for the first of some strings in a growing text, which holds back text that may become one of them."""

    def __init__(self, strings: tuple[str, ...], *, shown: bool = False) -> None:
        """Search for `strings`. If `shown`, the string that is found belongs to the text."""
        self._strings = strings
        self._shown = shown
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Add `text`. Return the text that is safe to show now, and the stop string that was found, or None.

        The shown text ends before the stop string, or with it if `shown`. If two strings are found at once, the one
        that starts earlier counts, then the one that is listed first.
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
        """Return the held-back text, after the last `push`."""
        held, self._held = self._held, ""
        return held


def longest_start_at_end(text: str, string: str) -> int:
    """Return the length of the longest proper prefix of `string` that `text` ends with."""
    return next((n for n in range(min(len(string) - 1, len(text)), 0, -1) if text.endswith(string[:n])), 0)
