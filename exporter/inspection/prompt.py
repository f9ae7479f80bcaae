"""The text that a model is inspected with; numbers or items for a model that reads no text."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from sharp.core.errors import InputError, NotFoundError
from sharp.exporter.inspection.recording import Floats, Inputs, InspectedModel

DEFAULT_TOKENS = 512
MIN_TOKENS = 2  # a single token sees one key, so no head could be sharp or dispersed


@dataclass(frozen=True)
class PromptSource:
    """The source of the text: at most one of a file, a text, token ids and a JSON file of numbers.

    `max_tokens` truncates the text; without a source, a text of at most `max_tokens` tokens (None: 512) is generated.

    Raises:
        InputError: there are several sources, or `max_tokens` is below 2.
    """

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
    """Token ids [tokens] (or numbers), the text of each token, and a short description of their source."""

    token_ids: Inputs
    pieces: tuple[str, ...]
    described: str


def tokenize(prompt: PromptSource, model: InspectedModel) -> TokenizedText:
    """Tokenize `prompt` for `model`; without a text, use the adaptive-temperature paper's prompt of Figure 3.

    Raises:
        InputError: the text is empty, too short (one token), too long for the model or not UTF-8, or has a token that
            the model does not know; the model has no tokenizer for a text, or numbers are given.
        NotFoundError: the file does not exist.
    """
    ids, described = _token_ids(prompt, model)
    if not ids:
        raise InputError(f"{described} is empty; give at least {MIN_TOKENS} tokens")
    if unknown := [token for token in ids if not 0 <= token < model.vocab_size]:
        raise InputError(
            f"token id {unknown[0]} is not in {model.name}'s vocabulary of {model.vocab_size} tokens; give smaller ids"
        )
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


def _token_ids(prompt: PromptSource, model: InspectedModel) -> tuple[list[int], str]:
    """Return the token ids of the prompt, and the words that say where they are from.

    Raises:
        InputError: the model reads no text or has no tokenizer.
    """
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
    """Return the text of a UTF-8 file. NotFoundError if it does not exist, InputError if it is not UTF-8."""
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise NotFoundError(f"--text {file} does not exist; give a text file") from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"--text {file} is not UTF-8 text: {error.reason} at byte {error.start}; save it as UTF-8"
        ) from error


def _encode(tokenizer: Tokenizer, text: str, source: str) -> list[int]:
    """Return the token ids of `text`. InputError, beginning with `source`, for text with lone surrogates."""
    try:
        text.encode()  # an argument that is not UTF-8 has lone surrogates, which tokenizers refuses with a TypeError
    except UnicodeEncodeError as error:
        raise InputError(f"{source} is not valid text: {error}") from error
    token_ids: list[int] = tokenizer.encode(text).ids
    return token_ids


def _maximum_question(tokenizer: Tokenizer, tokens: int) -> list[int]:
    """Return the prompt of the adaptive-temperature paper's Figure 3, with as many numbers as fit into `tokens`."""
    numbers = np.random.default_rng(0).integers(0, 1000, tokens)

    def question(count: int) -> list[int]:
        """Return the token ids of the question for the largest of the first `count` numbers."""
        sequence = ", ".join(str(number) for number in numbers[:count])
        return _encode(
            tokenizer, f"What is the maximum in the following sequence: {sequence}? The maximum is:", "the question"
        )

    fitting, too_many = 1, tokens  # counts of numbers, each of which takes two tokens or more
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        fitting, too_many = (middle, too_many) if len(question(middle)) <= tokens else (fitting, middle)
    return question(fitting)[:tokens]


def _pieces(tokenizer: Tokenizer | None, token_ids: Sequence[int]) -> tuple[str, ...]:
    """Return the text of every token; the name in the vocabulary if a token is only part of a character.

    Without a tokenizer, the texts are the ids.
    """
    if tokenizer is None:
        return tuple(f"{token} " for token in token_ids)
    texts = {token: tokenizer.decode([token], skip_special_tokens=False) for token in set(token_ids)}
    whole = {token: text if text and "\ufffd" not in text else None for token, text in texts.items()}
    return tuple(whole[token] or tokenizer.id_to_token(token) or str(token) for token in token_ids)


def read_tokenizer(file: Path) -> Tokenizer:
    """Read the tokenizer.json of a model folder, without padding and truncation.

    Raises:
        InputError: the file does not exist, or is not a tokenizer.
    """
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises nothing narrower
        raise InputError(f"{file} is not a tokenizer file; export the model again") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def read_numbers(prompt: PromptSource, model: InspectedModel) -> TokenizedText:
    """Read the numbers [tokens], or the items [items, width] of a set, that a model is inspected with, float32.

    Without a file they are random, 512 unless `prompt` says otherwise. `model` must not be one over tokens.

    Raises:
        InputError: a text is given, the number of inputs is too small or too large, or the file has another content.
        NotFoundError: the file does not exist.
    """
    width = model.numbers_of_item
    assert width is not None
    if any(source is not None for source in (prompt.file, prompt.text, prompt.token_ids)):
        raise InputError(f"{model.name} reads {model.unit}s, not text; give --numbers, or nothing for random ones")
    if prompt.numbers is None:
        values = random_numbers(width, min(prompt.max_tokens or DEFAULT_TOKENS, model.max_context))
        described = "random ones"
    else:
        values = _from_file(prompt, model, width)[: prompt.max_tokens]
        described = str(prompt.numbers)
    if not MIN_TOKENS <= len(values) <= model.max_context:
        limits = f"it must have {MIN_TOKENS} to {model.max_context} of them (--max-tokens cuts it)"
        raise InputError(f"{described} has {len(values)} {model.unit}s; {limits}")
    return TokenizedText(values, tuple(map(_piece, values)), described)


def random_numbers(width: int, count: int) -> Floats:
    """Return `count` random inputs, float32, the same in every call.

    With `width` 0, they are normally distributed numbers [count]. Otherwise they are items [count, width]: a priority
    from 0 to 1, and a random class as a one-hot vector.
    """
    generator = np.random.default_rng(0)
    if not width:
        return generator.standard_normal(count).astype(np.float32)
    classes = np.eye(width - 1)[generator.integers(width - 1, size=count)]
    return np.concatenate([generator.random((count, 1)), classes], axis=1).astype(np.float32)


def _from_file(prompt: PromptSource, model: InspectedModel, width: int) -> Floats:
    """Read the prompt's numbers from JSON: [items, width], or [items] if `width` is 0, as float32.

    Raises:
        NotFoundError: the file does not exist.
        InputError: it is no JSON, has another shape, or holds NaN or infinity.
    """
    file = prompt.numbers
    assert file is not None
    needed = f"a list of items, each a list of {width} numbers" if width else "a list of numbers"
    try:
        values = np.array(json.loads(file.read_bytes()), np.float64)
    except FileNotFoundError as error:
        raise NotFoundError(f"--numbers {file} does not exist; give a file of JSON, {needed}") from error
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise InputError(f"--numbers {file} cannot be read as JSON, {needed}: {error}"[:300]) from error
    if values.shape[1:] != ((width,) if width else ()) or values.ndim == 0 or not np.isfinite(values).all():
        raise InputError(f"--numbers {file} must be {needed}, all finite, for {model.name}")
    return values.astype(np.float32)


def _piece(value: Floats) -> str:
    """Format a number, or an item as its priority and class, for the page."""
    if value.ndim == 0:
        return f"{value:.3g} "
    return f"{value[0]:.3g}:{int(value[1:].argmax())} "
