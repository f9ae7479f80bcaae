"""The field `logprobs` of OpenAI's choices."""

from collections.abc import Iterable
from typing import Any

from sharp.serving.api.events import TokenLogprobs
from sharp.serving.frontends.http.token_texts import TokenTexts

# The logprob of a token that cannot come, as in vLLM, because JSON has no infinity.
LOWEST_LOGPROB = -9999.0


class TextLogprobs:
    """The writer of the field `logprobs` of `/v1/completions` for one choice, whose text grows.

    `text_offset` needs the number of characters before each token; the text has `characters` characters already.
    """

    def __init__(self, texts: TokenTexts, characters: int = 0) -> None:
        self._texts = texts
        self._characters = characters

    def of(self, entries: Iterable[TokenLogprobs]) -> dict[str, Any]:
        """Return the field `logprobs` for the next tokens of the text."""
        entries = tuple(entries)
        return {
            "tokens": [self._texts.of(entry.token_id).name for entry in entries],
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries],
            "text_offset": [self._offset(entry.token_id) for entry in entries],
        }

    def of_prompt(self, first: int, entries: Iterable[TokenLogprobs], text: str) -> dict[str, Any]:
        """Return the field `logprobs` for a prompt, whose first token id is `first` and whose text is `text`.

        The first token has no logprob (null), because nothing predicts it.
        """
        offset = self._offset(first)
        others = self.of(entries)
        # Some decoders leave out the space at the beginning of a text, which its first token has.
        missing = self._characters - len(text)
        return {
            "tokens": [self._texts.of(first).name, *others["tokens"]],
            "token_logprobs": [None, *others["token_logprobs"]],
            "top_logprobs": [None, *others["top_logprobs"]],
            "text_offset": [max(0, start - missing) for start in (offset, *others["text_offset"])],
        }

    def _offset(self, token_id: int) -> int:
        """Return the index in the text of the character that the token begins in, and advance by its characters."""
        token = self._texts.of(token_id)
        offset = self._characters - (token.inside and self._characters > 0)
        self._characters += token.characters
        return offset

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """Return the most likely tokens and the token that came. If several have one text, the likeliest counts."""
        top: dict[str, float] = {}
        for token, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            top.setdefault(self._texts.of(token).name, _finite(logprob))
        return top


def chat_logprobs(texts: TokenTexts, entries: Iterable[TokenLogprobs]) -> dict[str, Any]:
    """Return logprobs of tokens as the field `logprobs` of a choice of `/v1/chat/completions`."""

    def token(token_id: int, logprob: float) -> dict[str, Any]:
        """Return a token's text, log-probability and bytes as JSON values."""
        known = texts.of(token_id)
        return {"token": known.text, "logprob": _finite(logprob), "bytes": known.utf8}

    content = [
        {**token(entry.token_id, entry.logprob), "top_logprobs": [token(*likely) for likely in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _finite(logprob: float) -> float:
    """Return the log-probability, or `LOWEST_LOGPROB` if it is lower, infinite or NaN."""
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB  # NaN becomes the lowest, too
