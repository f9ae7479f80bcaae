"""Checks of a model's vocabulary against its tokenizer and special tokens, shared by the exporter and the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from sharp.core.errors import InputError

if TYPE_CHECKING:  # the library is not installed for every command that reads a manifest
    from tokenizers import Tokenizer

SHOWN = 3  # most names of tokens in a message


def check_special_tokens(where: str, vocab_size: int, bos_token_id: int | None, eos_token_ids: Sequence[int]) -> None:
    """Check that the tokens that begin and end a text are tokens of the model.

    Raises:
        InputError: a special token is not in the vocabulary; the message begins with `where`.
    """
    specials = [("bos_token_id", bos_token_id), *(("eos_token_ids", token) for token in eos_token_ids)]
    for name, token in specials:
        if token is not None and not 0 <= token < vocab_size:
            raise InputError(
                f"{where}: {name} has the token {token}, but the model has tokens 0 to {vocab_size - 1}; correct it"
            )


def check_embeddings(where: str, vocab_size: int, embeddings: int) -> None:
    """Check that a model can read every token that it may generate.

    Raises:
        InputError: the model has logits for more tokens than embeddings; the message begins with `where`.
    """
    if embeddings < vocab_size:
        raise InputError(
            f"{where} has logits for {vocab_size} tokens and embeddings for {embeddings}, so that it cannot read all "
            "that it generates; give it as many embeddings"
        )


def tokens_beyond(where: str, tokenizer: Tokenizer, vocab_size: int) -> dict[int, str]:
    """Return the texts of a tokenizer's added tokens that are beyond the model's vocabulary, by id; empty if none is.

    Such tokens are never generated, and prompts that contain them are refused. Gemma 3 1B has such a token for images.

    Raises:
        InputError: the tokenizer's merges are random, or the model lacks tokens of the tokenizer's own vocabulary, so
            the tokenizer is of another model; the message begins with `where`.
    """
    if dropout := getattr(tokenizer.model, "dropout", None):
        raise InputError(
            f"{where} leaves out merges at random (dropout {dropout:g}), so that a text has other tokens each time; "
            "set dropout to null in tokenizer.json"
        )
    tokens = max(tokenizer.get_vocab(with_added_tokens=False).values(), default=-1) + 1
    if tokens > vocab_size:
        raise InputError(
            f"{where} has {tokens} tokens, but the model has {vocab_size}; give the tokenizer that the model was "
            "trained with"
        )
    added = sorted(tokenizer.get_added_tokens_decoder().items())
    return {token_id: token.content for token_id, token in added if token_id >= vocab_size}


def beyond_sentence(beyond: Mapping[int, str], vocab_size: int) -> str:
    """Return a clause that names the tokens of the tokenizer that the model does not have, at most three by name.

    `beyond` is the result of `tokens_beyond`. The clause begins with "its tokenizer" and has no full stop.
    """
    named = ", ".join(f"{text} ({token_id})" for token_id, text in [*beyond.items()][:SHOWN])
    more = f" and {len(beyond) - SHOWN} more" if len(beyond) > SHOWN else ""
    return (
        f"its tokenizer has tokens beyond the {vocab_size} of the model, which are never generated and refused in "
        f"prompts: {named}{more}"
    )
