"""Bits per byte, the cross entropy with which a byte-level language model predicts a text."""

import math
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from sharp.core.errors import InputError, NotFoundError
from sharp.models.causal_lm import SharpForCausalLM
from sharp.models.checkpoint import Model
from sharp.models.text import encode, load_corpora

VALIDATION_LENGTH = 512


@torch.no_grad()
def window_bits(model: SharpForCausalLM, tokens: Tensor, length: int) -> Tensor:
    """Return the mean cross entropy in bits per token of every window, float32 [windows]; windows do not overlap.

    Args:
        model: predicts every token but the first from the tokens before it in its window.
        tokens: int [tokens], on the model's device, more than `length`; a rest that does not fill a window is left out.
        length: the number of tokens in a window.
    """
    windows = tokens[: (len(tokens) - 1) // length * length + 1].long()
    inputs, targets = windows[:-1].view(-1, length), windows[1:].view(-1, length)
    losses = [  # the logits of a single window stay in the CPU's cache
        functional.cross_entropy(model(row).flatten(0, 1), following.flatten())
        for row, following in zip(inputs.split(1), targets.split(1), strict=True)
    ]
    return torch.stack(losses) / math.log(2)


def bits_per_byte(model: SharpForCausalLM, tokens: Tensor, length: int = VALIDATION_LENGTH) -> float:
    """Return the mean cross entropy in bits per token, which is a byte, over all windows of `length` tokens.

    `tokens` are int [tokens] on the model's device, more than `length`.
    """
    return window_bits(model, tokens, length).mean().item()


def check_reads_bytes(model: Model) -> SharpForCausalLM:
    """Check that a model is a language model over bytes, and return it.

    Raises:
        InputError: the model is no language model, or its tokens are not bytes.
    """
    if not isinstance(model, SharpForCausalLM) or model.config.tokenizer != "bytes":
        raise InputError(f"a text is for language models over bytes; this is a {type(model).__name__} of another kind")
    return model


def read_text(path: Path | None) -> Tensor:
    """Read the tokens int16 [tokens] (bytes, then <|endoftext|>) of a file; None is the demo book's held-out part.

    Bytes that are not UTF-8 are replaced.

    Raises:
        NotFoundError: the file does not exist, or the book is neither installed nor can be downloaded.
        InputError: the file is empty.
    """
    if path is None:
        return load_corpora()[0].validation
    if not path.is_file():
        raise NotFoundError(f"text {path} does not exist; give a file")
    content = path.read_text(encoding="utf-8", errors="replace")
    if not content:
        raise InputError(f"text {path} is empty; give another file")
    return encode([content])
