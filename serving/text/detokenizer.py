"""Token ids to text, one token at a time."""

from sharp.serving.text.tokenizer import Tokenizer

INCOMPLETE = "\ufffd"  # what a decoder gives for bytes that are not a character (yet)
LONGEST_CHARACTER = 4  # bytes, and so tokens, of one UTF-8 character
MAX_PENDING = 16


class Detokenizer:
    """Gives the text of a growing list of tokens in whole characters.

    A token's text can depend on the token before it (a leading space, the bytes of one character), so the
    tokens since the last text are always decoded together with the ones that gave it. The first token may follow one
    that is not to be shown, the last of a prompt: some decoders leave out the space that a text begins with.
    """

    def __init__(self, tokenizer: Tokenizer, before: int | None = None, *, special_tokens: bool = False) -> None:
        """The first token follows `before`. Special tokens have a text where it shall have them."""
        self._tokenizer = tokenizer
        self._special_tokens = special_tokens
        self._before = before
        self._shown: list[int] = []
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """Add a token; return the text that became certain, often empty."""
        if self._before is not None:
            whole = INCOMPLETE not in self._decode([self._before])  # else it is not known what it shows
            self._shown = [self._before] if whole else []
            self._before = None
        self._pending.append(token_id)
        text = self._pending_text()
        if text and not text.endswith(INCOMPLETE):
            self._shown, self._pending = self._pending, []
            return text
        return self._give_up_on_bytes() if len(self._pending) >= MAX_PENDING else ""

    def flush(self) -> str:
        """The rest, once no token will come: without a character that was left unfinished."""
        text = self._pending_text().rstrip(INCOMPLETE)
        self._shown, self._pending = self._pending, []
        return text

    def _pending_text(self) -> str:
        alone = len(self._shown) == 1 and not self._special_tokens  # as a rule; decoding takes longer than looking
        before = self._tokenizer.decode_one(self._shown[0]) if alone else self._decode(self._shown)
        return self._decode(self._shown + self._pending)[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, special_tokens=self._special_tokens)

    def _give_up_on_bytes(self) -> str:
        """Show a long run of bytes that are no character, or decoding it would take ever longer."""
        whole = self._pending_text()
        for cut in range(len(self._pending) - LONGEST_CHARACTER, len(self._pending) - 2 * LONGEST_CHARACTER, -1):
            head, tail = self._pending[:cut], self._pending[cut:]
            text = self._decode(self._shown + head)[len(self._decode(self._shown)) :]
            # A cut inside a character would show it as two broken ones.
            if text + self._decode(head + tail)[len(self._decode(head)) :] == whole:
                self._shown, self._pending = head, tail
                return text
        return ""
