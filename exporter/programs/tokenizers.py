"""The tokenizer of a model that has none of its own: a file, a folder, or the bytes of the text."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from sharp.core.errors import InputError, NotFoundError
from sharp.core.tokenizer_trial import check_tokenizer_file
from sharp.core.vocabulary import tokens_beyond
from sharp.models.byte_tokenizer import END_OF_TEXT_ID, byte_tokenizer

FILE = "tokenizer.json"
CONFIG = "tokenizer_config.json"


@dataclass(frozen=True)
class ProgramTokenizer:
    """A function that writes `tokenizer.json` into a folder, and the ids of the tokens that begin and end a text.

    `bos` is None and `eos` is empty if these tokens are not known.
    """

    write: Callable[[Path], object]
    bos: int | None = None
    eos: tuple[int, ...] = ()


def read_tokenizer(given: str, vocab_size: int) -> ProgramTokenizer:
    """Read the tokenizer that `given` names: a `tokenizer.json`, a folder with one, or "bytes".

    The tokens that begin and end a text are in the folder's tokenizer_config.json, if it has one. A file of its own has
    none; "bytes" has an end-of-text token, unless the model has a vocabulary of 256.

    Raises:
        NotFoundError: the tokenizer does not exist.
        InputError: the tokenizer cannot be read, or is larger than the model's vocabulary.
    """
    if given == "bytes":
        tokenizer = byte_tokenizer()
        if vocab_size == END_OF_TEXT_ID:  # a model of the 256 bytes alone
            return ProgramTokenizer(lambda folder: tokenizer.save(str(folder / FILE)))
        tokens_beyond("the tokenizer bytes", tokenizer, vocab_size)
        return ProgramTokenizer(lambda folder: tokenizer.save(str(folder / FILE)), eos=(END_OF_TEXT_ID,))
    path = Path(given)
    if not path.exists():
        raise NotFoundError(f"the tokenizer {given} does not exist; give a tokenizer.json, a folder with one, or bytes")
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise InputError(f"{file} does not exist; give a tokenizer.json, a folder with one, or bytes")
    check_tokenizer_file(file)
    tokenizer = Tokenizer.from_file(str(file))
    tokens_beyond(f"the tokenizer {given}", tokenizer, vocab_size)
    specials = _specials(file.parent / CONFIG, tokenizer) if path.is_dir() else {}
    bos, eos = specials.get("bos_token"), specials.get("eos_token")
    return ProgramTokenizer(lambda folder: tokenizer.save(str(folder / FILE)), bos, () if eos is None else (eos,))


def _specials(path: Path, tokenizer: Tokenizer) -> dict[str, int]:
    """Read the ids of the tokens `bos_token` and `eos_token` from a tokenizer_config.json of transformers.

    A token that is not there is left out; the result is empty if the file is missing or damaged.
    """
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    found: dict[str, int] = {}
    for name in ("bos_token", "eos_token"):
        token = content.get(name) if isinstance(content, dict) else None
        token = token.get("content") if isinstance(token, dict) else token
        number = tokenizer.token_to_id(token) if isinstance(token, str) else None
        if number is not None:
            found[name] = number
    return found
