"""The text that a model is inspected with."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from sharp.exporter.inspection.recording import Inputs, InspectedModel
from sharp.plugins.errors import InputError, NotFoundError

DEFAULT_TOKENS = 512
MIN_TOKENS = 2  # one token sees one key: no head can be sharp or dispersed


@dataclass(frozen=True)
class Prompt:
    """What to read: at most one of a file with text, a text, token ids and a file of numbers; `max_tokens` cuts it."""

    file: Path | None = None
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    max_tokens: int | None = None
    numbers: Path | None = None

    def __post_init__(self) -> None:
        if sum(source is not None for source in (self.file, self.text, self.token_ids, self.numbers)) > 1:
            raise InputError("give one of --text, --prompt, --token-ids and --numbers")
        if self.max_tokens is not None and self.max_tokens < MIN_TOKENS:
            raise InputError(f"--max-tokens is {self.max_tokens}, but must be at least {MIN_TOKENS}")


@dataclass(frozen=True)
class TokenizedText:
    """Token ids [tokens] (or numbers), the text of each, and in a few words where they come from."""

    token_ids: Inputs
    pieces: tuple[str, ...]
    described: str


def tokenize(prompt: Prompt, model: InspectedModel) -> TokenizedText:
    """The tokens of `prompt` for `model`; without a text, the adaptive-temperature paper's prompt of Figure 3.

    Raises:
        InputError: there is no text, or too short or long a one, or a token that the model does not know.
        NotFoundError: there is no such file.
    """
    ids, described = _token_ids(prompt, model)
    if not ids:
        raise InputError(f"{described} is empty; give at least {MIN_TOKENS} tokens")
    if unknown := [token for token in ids if not 0 <= token < model.vocab_size]:
        raise InputError(f"token id {unknown[0]} is not in {model.name}'s vocabulary of {model.vocab_size} tokens")
    kept = ids[: prompt.max_tokens]
    if len(kept) > model.max_context:
        raise InputError(
            f"{described} has {len(kept)} tokens, but {model.name} takes at most {model.max_context}; "
            f"look at its beginning with --max-tokens {model.max_context}"
        )
    if len(kept) < MIN_TOKENS:
        raise InputError(f"{described} has {len(kept)} token; give at least {MIN_TOKENS}")
    if len(kept) < len(ids):
        described = f"the first {len(kept)} of {len(ids)} tokens of {described}"
    return TokenizedText(np.array(kept, np.int64), _pieces(model.tokenizer, kept), described)


def _token_ids(prompt: Prompt, model: InspectedModel) -> tuple[list[int], str]:
    if prompt.numbers is not None:
        raise InputError(f"{model.name} reads text, and --numbers is for models of sets or of numbers; give --text")
    if prompt.token_ids is not None:
        return list(prompt.token_ids), "--token-ids"
    if model.tokenizer is None:
        raise InputError(f"{model.name} has no tokenizer; give numbers with --token-ids")
    if prompt.file is not None:
        return _encode(model.tokenizer, _read(prompt.file), str(prompt.file)), str(prompt.file)
    if prompt.text is not None:
        return _encode(model.tokenizer, prompt.text, "--prompt"), "--prompt"
    limit = min(prompt.max_tokens or DEFAULT_TOKENS, model.max_context)
    return _maximum_question(model.tokenizer, limit), "a generated question for the largest of many numbers"


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise NotFoundError(f"--text {file} does not exist; give a text file") from error
    except UnicodeDecodeError as error:
        raise InputError(f"--text {file} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def _encode(tokenizer: Tokenizer, text: str, source: str) -> list[int]:
    try:
        text.encode()  # an argument that is not UTF-8 has lone surrogates, which tokenizers refuses with a TypeError
    except UnicodeEncodeError as error:
        raise InputError(f"{source} is not valid text: {error}") from error
    token_ids: list[int] = tokenizer.encode(text).ids
    return token_ids


def _maximum_question(tokenizer: Tokenizer, tokens: int) -> list[int]:
    """The prompt of the adaptive-temperature paper's Figure 3 with as many numbers as `tokens` leave room for."""
    numbers = np.random.default_rng(0).integers(0, 1000, tokens)

    def question(count: int) -> list[int]:
        sequence = ", ".join(str(number) for number in numbers[:count])
        return _encode(
            tokenizer, f"What is the maximum in the following sequence: {sequence}? The maximum is:", "the question"
        )

    fitting, too_many = 1, tokens  # numbers; each takes two tokens or more
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        fitting, too_many = (middle, too_many) if len(question(middle)) <= tokens else (fitting, middle)
    return question(fitting)[:tokens]


def _pieces(tokenizer: Tokenizer | None, token_ids: Sequence[int]) -> tuple[str, ...]:
    """The text of every token; the vocabulary's own name of one that is only a part of a character."""
    if tokenizer is None:
        return tuple(f"{token} " for token in token_ids)
    texts = {token: tokenizer.decode([token], skip_special_tokens=False) for token in set(token_ids)}
    whole = {token: text if text and "\ufffd" not in text else None for token, text in texts.items()}
    return tuple(whole[token] or tokenizer.id_to_token(token) or str(token) for token in token_ids)


def read_tokenizer(file: Path) -> Tokenizer:
    """The tokenizer of a model folder, which neither pads nor cuts.

    Raises:
        InputError: the file is not a tokenizer.
    """
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises nothing narrower
        raise InputError(f"{file} is not a tokenizer file; export the model again") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer
