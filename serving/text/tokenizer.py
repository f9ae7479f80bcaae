"""`Tokenizer`: converts text to token ids and back, with the tokenizer file of a model folder."""

import json
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FileTokenizer

from sharp.core.errors import is_panic
from sharp.core.machine import available_cpus
from sharp.core.manifest import Manifest
from sharp.core.tokenizer_trial import check_tokenizer_file
from sharp.core.vocabulary import beyond_sentence, tokens_beyond
from sharp.serving.api.errors import EngineError, FieldError, InputError

logger = logging.getLogger(__name__)

# If a text has more characters than this per allowed token, its start is tokenized first, to refuse it early.
CHARACTERS_PER_TOKEN = 8
MOST_CHARACTERS = 2**19
TOKEN_BYTES = 48  # the most bytes of a token in a request: 8 characters, each of which may be escaped as \uXXXX


class Tokenizer:
    """The tokenizer of a model, loaded from its tokenizer.json: texts to token ids and back. Thread-safe."""

    def __init__(self, path: Path) -> None:
        """Load the tokenizer file.

        Raises:
            InputError: the file is not a tokenizer, or the tokenizers library fails at it.
        """
        check_tokenizer_file(path)
        try:
            self._tokenizer = FileTokenizer.from_file(str(path))
        except Exception as error:  # the tokenizers library raises plain Exception
            raise InputError(f"{path} is not a tokenizer file: {error}; export the model again") from error
        # The file may pad or cut to the training length; a server does neither.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        # Limits concurrent encoding, because a long text takes 100 times its size in memory meanwhile.
        self._together = threading.BoundedSemaphore(available_cpus())
        # A copy of the tokenizer that truncates, created when needed, because truncation is a setting of the whole
        # tokenizer.
        self._cutting: FileTokenizer | None = None
        self._cutting_lock = threading.Lock()
        added = self._tokenizer.get_added_tokens_decoder().items()
        self._alone: dict[int, str] = {}  # cache of the texts of single tokens, at most one per token of the vocabulary
        self._special = {token.content: token_id for token_id, token in added if token.special}

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Return the token ids of a prompt, with the tokenizer file's special tokens around it if `special_tokens`.

        Raises:
            FieldError: the text is not valid Unicode, or the tokenizer fails at it; the field is `prompt`.
        """
        # The text is encoded as a batch of one, because `encode` would hold the GIL, and block all other threads, while
        # it encodes a long text.
        (encoding,) = self._encode(self._tokenizer, [text], special_tokens)
        token_ids: list[int] = encoding.ids
        return token_ids

    def encode_texts(
        self,
        texts: Sequence[str | tuple[str, str]],
        *,
        special_tokens: bool = True,
        most: int | None = None,
        cut_left: bool = False,
    ) -> list[tuple[list[int], list[int]]]:
        """Return token ids and token types of texts and of pairs of texts.

        If `most` is set, each is cut to `most` tokens, in a pair the longer text first, and with `cut_left` at its
        beginning. The type of a token is 0 or 1, the number of its text in a pair.

        Raises:
            FieldError: a text is not valid Unicode, the tokenizer fails at it, or `most` is less than the special
                tokens of a text.
        """
        if most is None:
            found = self._encode(self._tokenizer, texts, special_tokens)
        else:
            with self._cutting_lock:
                if self._cutting is None:
                    self._cutting = FileTokenizer.from_str(self.to_json())
                self._cutting.enable_truncation(most, direction="left" if cut_left else "right")
                found = self._encode(self._cutting, texts, special_tokens)
            if any(len(encoding) > most for encoding in found):
                reason = "is less than the special tokens of a text"
                raise FieldError("truncate_prompt_tokens", f"truncate_prompt_tokens is {most}, which {reason}")
        return [(encoding.ids, encoding.type_ids) for encoding in found]

    def _encode(self, tokenizer: FileTokenizer, texts: Sequence[Any], special_tokens: bool) -> list[Any]:
        """Tokenize texts together, and return the library's encodings.

        Raises:
            FieldError: a text is not valid Unicode, or the tokenizer fails at it.
        """
        try:
            with self._together:
                found: list[Any] = tokenizer.encode_batch_fast(list(texts), add_special_tokens=special_tokens)
        # The tokenizers library raises TypeError for half of a surrogate pair.
        except (UnicodeEncodeError, TypeError) as error:
            raise FieldError(
                "prompt", "prompt is not valid text: it has half of a surrogate pair; send valid Unicode"
            ) from error
        except BaseException as error:
            if is_panic(error) or type(error) is Exception:  # the tokenizers library's own, for letters without a token
                raise FieldError("prompt", f"the model's tokenizer fails at prompt: {error}; change it") from error
            raise
        return found

    def decode(self, token_ids: Sequence[int], *, special_tokens: bool = False) -> str:
        """Return the text of token ids, without special tokens unless `special_tokens`.

        Raises:
            EngineError: the tokenizer panics at these tokens.
        """
        try:
            return self._tokenizer.decode(list(token_ids), skip_special_tokens=not special_tokens)
        except BaseException as error:
            if is_panic(error):  # a panic is not an Exception, and would end the engine's thread
                raise EngineError(f"the model's tokenizer fails at the tokens of a text: {error}") from error
            raise

    def decode_one(self, token_id: int) -> str:
        """Return the text of a single token, without special tokens."""
        if (text := self._alone.get(token_id)) is None:
            text = self._alone[token_id] = self.decode([token_id])
        return text

    def token(self, token_id: int) -> str:
        """Return the text of a token inside a text, special tokens included. Parts of characters are U+FFFD."""
        # The token is decoded after itself, because some decoders omit a space at the beginning of a text.
        once, twice = (self.decode([token_id] * times, special_tokens=True) for times in (1, 2))
        return twice[len(once) :]

    def names(self, token_ids: Sequence[int]) -> list[str | None]:
        """Return each token's name in the vocabulary; None for ids beyond the vocabulary, which models may have."""
        return [self._tokenizer.id_to_token(token_id) for token_id in token_ids]

    def has(self, tokens: Sequence[str]) -> bool:
        """Whether each of `tokens` is a token of the vocabulary."""
        return all(self._tokenizer.token_to_id(token) is not None for token in tokens)

    def special_tokens(self, texts: Sequence[str]) -> dict[int, str]:
        """Return those of `texts` that are special tokens, which `decode` leaves out, by token id."""
        return {self._special[text]: text for text in texts if text in self._special}

    @property
    def special_texts(self) -> list[str]:
        """The texts of all special tokens, in the order of their ids."""
        return sorted(self._special, key=self._special.__getitem__)

    def tokens_beyond(self, where: str, vocab_size: int) -> dict[int, str]:
        """Return the added tokens, by id, that a model of `vocab_size` tokens lacks.

        Raises:
            InputError: the model lacks tokens of the tokenizer's own vocabulary; the message begins with `where`.
        """
        return tokens_beyond(where, self._tokenizer, vocab_size)

    def to_json(self, vocab_size: int | None = None) -> str:
        """Return the text of a tokenizer file, without added tokens whose ids are `vocab_size` or higher."""
        text = str(self._tokenizer.to_str())
        if vocab_size is None or not tokens_beyond("", self._tokenizer, vocab_size):
            return text
        content = json.loads(text)
        content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < vocab_size]
        return json.dumps(content)


def load_tokenizer(folder: Path, manifest: Manifest) -> Tokenizer | None:
    """Load the tokenizer of a model folder. Return None for a model that has none.

    Raises:
        InputError: the file is not a tokenizer, or is the tokenizer of another model.
    """
    if manifest.tokenizer.file is None:
        return None
    path = folder / manifest.tokenizer.file
    tokenizer = Tokenizer(path)
    if beyond := tokenizer.tokens_beyond(str(path), manifest.vocab_size):
        logger.warning("%s: %s", path, beyond_sentence(beyond, manifest.vocab_size))
    return tokenizer


def tokenize(text: str, manifest: Manifest, tokenizer: Tokenizer | None, *, special_tokens: bool = True) -> list[int]:
    """Return the token ids of a text prompt.

    Raises:
        FieldError: the model has no tokenizer, or the tokenizer fails at the text.
    """
    if tokenizer is None:
        raise FieldError("prompt", f"prompt is text, and {manifest.name} has no tokenizer; send token ids")
    return tokenizer.encode(text, special_tokens=special_tokens)


def check_characters(text: str, context_limit: int) -> None:
    """Refuse a text whose tokenization would take too much memory of the server. The text need not fit the context.

    Raises:
        FieldError: the text has more characters than a full context may have, and more than half a million.
    """
    limit = max(MOST_CHARACTERS, context_limit * CHARACTERS_PER_TOKEN)
    if len(text) > limit:
        raise FieldError("prompt", f"prompt has {len(text)} characters; the limit is {limit}, tokenize it in parts")


def check_token_ids(name: str, token_ids: Sequence[int], manifest: Manifest) -> None:
    """Refuse token ids, in the field `name` of a request, that the model does not have.

    Raises:
        FieldError: a token id is outside the vocabulary; the message names the id.
    """
    low, high = min(token_ids, default=0), max(token_ids, default=0)
    if low < 0 or high >= manifest.vocab_size:
        limit = f"{manifest.name} has ids 0 to {manifest.vocab_size - 1}"
        raise FieldError(name, f"{name} has token id {low if low < 0 else high}; {limit}")
