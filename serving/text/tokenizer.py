"""Text to token ids and back, with the tokenizer file of a model folder."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FileTokenizer

from sharp.plugins.errors import is_panic
from sharp.plugins.manifest import Manifest
from sharp.plugins.tokenizer_trial import check_tokenizer_file
from sharp.serving.api.errors import EngineError, FieldError, InputError
from sharp.serving.machine import available_cpus

# Of text that is longer than this many characters per allowed token, the start is tokenized first.
CHARACTERS_PER_TOKEN = 8
MOST_CHARACTERS = 2**19


class Tokenizer:
    """The tokenizer of a model. Safe to share between threads."""

    def __init__(self, path: Path) -> None:
        """Load the file.

        Raises:
            InputError: it is no tokenizer, or the library fails at it.
        """
        check_tokenizer_file(path)
        try:
            self._tokenizer = FileTokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise InputError(f"{path} is not a tokenizer file: {error}; export the model again") from error
        # The file may pad or cut to the training length; a server does neither.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        # A long text takes 100 times its size meanwhile.
        self._together = threading.BoundedSemaphore(available_cpus())
        self._cutting: FileTokenizer | None = None  # one that cuts, made when it is needed: how is a state of its own
        self._cutting_lock = threading.Lock()
        added = self._tokenizer.get_added_tokens_decoder().items()
        self._alone: dict[int, str] = {}  # the texts of single tokens, at most all of the vocabulary
        self._special = {token.content: token_id for token_id, token in added if token.special}

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """The token ids of a prompt, with the tokenizer file's special tokens around it if `special_tokens`."""
        # A batch of one: `encode` would keep Python's lock, and with it every other thread, for all of a long text.
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
        """Token ids and token types of texts and pairs, cut to `most` tokens if it is set, the longer first."""
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
        try:
            with self._together:
                found: list[Any] = tokenizer.encode_batch_fast(list(texts), add_special_tokens=special_tokens)
        except (UnicodeEncodeError, TypeError) as error:  # the library's word for half a surrogate pair is TypeError
            raise FieldError("prompt", "prompt is not valid text: it has half of a surrogate pair") from error
        except BaseException as error:
            if is_panic(error) or type(error) is Exception:  # the library's own, for letters that no token has
                raise FieldError("prompt", f"the model's tokenizer fails at prompt: {error}; change it") from error
            raise
        return found

    def decode(self, token_ids: Sequence[int], *, special_tokens: bool = False) -> str:
        """The text of token ids, without special tokens unless requested."""
        try:
            return self._tokenizer.decode(list(token_ids), skip_special_tokens=not special_tokens)
        except BaseException as error:
            if is_panic(error):  # it is no Exception, and would end the engine's thread
                raise EngineError(f"the model's tokenizer fails at the tokens of a text: {error}") from error
            raise

    def decode_one(self, token_id: int) -> str:
        """The text of one token alone, without special tokens."""
        if (text := self._alone.get(token_id)) is None:
            text = self._alone[token_id] = self.decode([token_id])
        return text

    def token(self, token_id: int) -> str:
        """The text of one token inside a text, special or not; parts of characters are U+FFFD."""
        # After itself: some decoders leave out the space that a text begins with.
        once, twice = (self.decode([token_id] * times, special_tokens=True) for times in (1, 2))
        return twice[len(once) :]

    def names(self, token_ids: Sequence[int]) -> list[str | None]:
        """What the vocabulary calls each token; None where it has no such id, as a model may have more of them."""
        return [self._tokenizer.id_to_token(token_id) for token_id in token_ids]

    def has(self, tokens: Sequence[str]) -> bool:
        """Whether each of these texts is a token."""
        return all(self._tokenizer.token_to_id(token) is not None for token in tokens)

    def special_tokens(self, texts: Sequence[str]) -> dict[int, str]:
        """Those of the texts that are special tokens, which `decode` leaves out, by their ids."""
        return {self._special[text]: text for text in texts if text in self._special}

    def to_json(self) -> str:
        """The tokenizer as the text of a tokenizer file."""
        return str(self._tokenizer.to_str())


def load_tokenizer(folder: Path, manifest: Manifest) -> Tokenizer | None:
    """The tokenizer of a model folder, or None for a model that has none.

    Raises:
        InputError: the file is not a tokenizer.
    """
    return None if manifest.tokenizer.file is None else Tokenizer(folder / manifest.tokenizer.file)


def tokenize(text: str, manifest: Manifest, tokenizer: Tokenizer | None, *, special_tokens: bool = True) -> list[int]:
    """The token ids of a text prompt.

    Raises:
        InputError: the model has no tokenizer.
    """
    if tokenizer is None:
        raise FieldError("prompt", f"prompt is text, and {manifest.name} has no tokenizer; send token ids")
    return tokenizer.encode(text, special_tokens=special_tokens)


def check_characters(text: str, context_limit: int) -> None:
    """Refuse a text to tokenize, which need not fit the context, that would take a server's memory.

    Raises:
        FieldError: it has more characters than a full context may have, and more than half a million.
    """
    limit = max(MOST_CHARACTERS, context_limit * CHARACTERS_PER_TOKEN)
    if len(text) > limit:
        raise FieldError("prompt", f"prompt has {len(text)} characters; the limit is {limit}, tokenize it in parts")


def check_token_ids(name: str, token_ids: Sequence[int], manifest: Manifest) -> None:
    """Refuse token ids, in the field `name` of a request, that the model has not.

    Raises:
        FieldError: which one.
    """
    low, high = min(token_ids, default=0), max(token_ids, default=0)
    if low < 0 or high >= manifest.vocab_size:
        limit = f"{manifest.name} has ids 0 to {manifest.vocab_size - 1}"
        raise FieldError(name, f"{name} has token id {low if low < 0 else high}; {limit}")
