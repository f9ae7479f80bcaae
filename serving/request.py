"""One request, and the checks that every prompt passes before the engine sees it."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass

from sharp.plugins.manifest import Manifest
from sharp.serving.errors import InputError
from sharp.serving.sampling_params import SamplingParams
from sharp.serving.tokenizer import Tokenizer

Prompt = str | Sequence[int]

# Of text that is longer than this many characters per allowed token, the start is tokenized first.
CHARACTERS_PER_TOKEN = 8


@dataclass(frozen=True)
class Request:
    """What the engine is asked for: a checked prompt that fits the context together with `max_new_tokens`."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    max_new_tokens: int
    attention: bool = False


def prepare_request(
    request_id: str,
    prompt: Prompt,
    params: SamplingParams,
    *,
    manifest: Manifest,
    tokenizer: Tokenizer | None,
    context_limit: int,
    attention: bool = False,
) -> Request:
    """Tokenize and check a prompt. `context_limit` is the longest sequence that one request may grow to.

    Raises:
        InputError: the prompt is empty, has a token that the model has not, is text for a model without a tokenizer,
            or leaves no room in the context; or stop strings for a model without a tokenizer.
    """
    if tokenizer is None and params.stop:
        raise InputError(f"stop strings need text, and {manifest.name} has no tokenizer; use stop_token_ids")
    if isinstance(prompt, str):
        _check_start(prompt, manifest, tokenizer, context_limit)
        prompt = tokenize(prompt, manifest, tokenizer)
    try:
        prompt_ids = tuple(map(operator.index, prompt))  # numpy's integers too, but no 1.5 that would become 1
    except TypeError as error:
        raise InputError(f"prompt is neither text nor a list of token ids: {error}") from error
    if not prompt_ids:
        raise InputError("prompt has 0 tokens; it must have at least 1")
    low, high = min(prompt_ids), max(prompt_ids)
    if low < 0 or high >= manifest.vocab_size:
        raise InputError(
            f"prompt has token id {low if low < 0 else high}; {manifest.name} has ids 0 to {manifest.vocab_size - 1}"
        )
    room = context_limit - len(prompt_ids)
    needed = 0 if params.max_tokens == 0 else 1
    if room < needed:
        raise InputError(
            f"prompt has {len(prompt_ids)} tokens; the limit is {context_limit - needed}"
            + (f" (a context of {context_limit} with room for one new token)" if needed else "")
        )
    max_new_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    return Request(request_id, prompt_ids, params, max_new_tokens, attention)


def _check_start(text: str, manifest: Manifest, tokenizer: Tokenizer | None, limit: int) -> None:
    """Refuse a text that is far too long without spending seconds on tokenizing all of it."""
    start = text[: limit * CHARACTERS_PER_TOKEN]
    # Where text is cut, a word may become more tokens than it is: a tenth more proves that the whole is too long.
    if len(start) < len(text) and len(tokenize(start, manifest, tokenizer)) > limit * 1.1:
        raise InputError(f"prompt has {len(text)} characters, which is far more than {limit} tokens, the limit")


def tokenize(text: str, manifest: Manifest, tokenizer: Tokenizer | None) -> list[int]:
    """The token ids of a text prompt.

    Raises:
        InputError: the model has no tokenizer.
    """
    if tokenizer is None:
        raise InputError(f"prompt is text, and {manifest.name} has no tokenizer; send token ids")
    return tokenizer.encode(text)
