"""`Detokenizer`: converts token ids to text, one token at a time."""

from sharp.serving.text.tokenizer import Tokenizer

INCOMPLETE = "\ufffd"  # a decoder's output for bytes that are not (yet) a character
LONGEST_CHARACTER = 4  # maximum bytes, and so tokens, of one UTF-8 character
MAX_PENDING = 16


class Detokenizer:
    """A converter of a growing list of tokens to text, in whole characters.

    A token's text can depend on the token before it (a leading space, the bytes of one character). Therefore tokens
    without text yet are always decoded together with the tokens of the last returned text. The first token may follow a
    token that is not shown, the last token of the prompt, because some decoders omit a space at the beginning of a
    text.
    """

    def __init__(self, tokenizer: Tokenizer, before: int | None = None, *, special_tokens: bool = False) -> None:
        """Decode the tokens that follow the token `before`. If `special_tokens`, special tokens have a text."""
        self._tokenizer = tokenizer
        self._special_tokens = special_tokens
        self._before = before
        self._shown: list[int] = []
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """Add a token and return the text that is now final, often empty."""
        if self._before is not None:
            whole = INCOMPLETE not in self._decode([self._before])  # otherwise the text of `before` is incomplete
            self._shown = [self._before] if whole else []
            self._before = None
        self._pending.append(token_id)
        text = self._pending_text()
        if text and not text.endswith(INCOMPLETE):
            self._shown, self._pending = self._pending, []
            return text
        return self._give_up_on_bytes() if len(self._pending) >= MAX_PENDING else ""

    def flush(self) -> str:
        """Return the remaining text after the last token, without an unfinished character."""
        text = self._pending_text().rstrip(INCOMPLETE)
        self._shown, self._pending = self._pending, []
        return text

    def _pending_text(self) -> str:
        """Return the text that the pending tokens add after the shown ones."""
        alone = len(self._shown) == 1 and not self._special_tokens  # usually true; a cached text saves decoding
        before = self._tokenizer.decode_one(self._shown[0]) if alone else self._decode(self._shown)
        return self._decode(self._shown + self._pending)[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        """Return the text of token ids, with special tokens if they are to be shown."""
        return self._tokenizer.decode(token_ids, special_tokens=self._special_tokens)

    def _give_up_on_bytes(self) -> str:
        """Return the text of a long run of bytes that is not a character, because decoding it takes ever longer."""
        whole = self._pending_text()
        for cut in range(len(self._pending) - LONGEST_CHARACTER, len(self._pending) - 2 * LONGEST_CHARACTER, -1):
            head, tail = self._pending[:cut], self._pending[cut:]
            text = self._decode(self._shown + head)[len(self._decode(self._shown)) :]
            # A cut inside a character would show the character as two broken ones.
            if text + self._decode(head + tail)[len(self._decode(head)) :] == whole:
                self._shown, self._pending = head, tail
                return text
        return ""
