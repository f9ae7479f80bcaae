"""The tokenizer of a program, which itself has none: a file, a folder, or the bytes of the text."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from sharp.models.byte_tokenizer import END_OF_TEXT_ID, byte_tokenizer
from sharp.plugins.errors import InputError, NotFoundError

FILE = "tokenizer.json"
CONFIG = "tokenizer_config.json"


@dataclass(frozen=True)
class ProgramTokenizer:
    """What writes `tokenizer.json` into a folder, and the ids of special tokens that its configuration names."""

    write: Callable[[Path], object]
    bos: int | None = None
    eos: tuple[int, ...] = ()


def read_tokenizer(given: str, vocab_size: int) -> ProgramTokenizer:
    """Read the tokenizer that `given` names: a `tokenizer.json`, a folder with one, or "bytes".

    Raises:
        NotFoundError, InputError: it is not there, cannot be read, or has more tokens than the model.
    """
    if given == "bytes":
        tokenizer = byte_tokenizer()
        if vocab_size == END_OF_TEXT_ID:  # a model of the 256 bytes alone
            return ProgramTokenizer(lambda folder: tokenizer.save(str(folder / FILE)))
        _check_size(given, tokenizer, vocab_size)
        return ProgramTokenizer(lambda folder: tokenizer.save(str(folder / FILE)), eos=(END_OF_TEXT_ID,))
    path = Path(given)
    if not path.exists():
        raise NotFoundError(f"the tokenizer {given} does not exist; give a tokenizer.json, a folder with one, or bytes")
    file = path / FILE if path.is_dir() else path
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises nothing narrower
        raise InputError(
            f"{file} cannot be read as a tokenizer; give a tokenizer.json, a folder with one, or bytes"
        ) from error
    _check_size(given, tokenizer, vocab_size)
    specials = _specials(file.parent / CONFIG, tokenizer) if path.is_dir() else {}
    bos, eos = specials.get("bos_token"), specials.get("eos_token")
    return ProgramTokenizer(lambda folder: tokenizer.save(str(folder / FILE)), bos, () if eos is None else (eos,))


def _check_size(given: str, tokenizer: Tokenizer, vocab_size: int) -> None:
    if tokenizer.get_vocab_size() > vocab_size:
        raise InputError(
            f"the tokenizer {given} has {tokenizer.get_vocab_size()} tokens, but the model has logits for {vocab_size}"
            "; give the tokenizer that it was trained with"
        )


def _specials(path: Path, tokenizer: Tokenizer) -> dict[str, int]:
    """The ids of the tokens that begin and end a text, as a folder of transformers names them."""
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
