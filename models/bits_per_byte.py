"""How well a byte-level language model predicts a text."""

import math
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from sharp.models.causal_lm import SharpForCausalLM
from sharp.models.checkpoint import Model
from sharp.models.text import encode, load_corpora
from sharp.plugins.errors import InputError, NotFoundError

VALIDATION_LENGTH = 512


@torch.no_grad()
def window_bits(model: SharpForCausalLM, tokens: Tensor, length: int) -> Tensor:
    """Mean cross entropy in bits of every window of `length`, float32 [windows]; windows do not overlap.

    Args:
        model: says every token but the first from those before it in its window.
        tokens: int [tokens], on the model's device; what does not fill a window is left out.
        length: tokens in a window.
    """
    windows = tokens[: (len(tokens) - 1) // length * length + 1].long()
    inputs, targets = windows[:-1].view(-1, length), windows[1:].view(-1, length)
    losses = [  # one at a time stays in the CPU's cache
        functional.cross_entropy(model(row).flatten(0, 1), following.flatten())
        for row, following in zip(inputs.split(1), targets.split(1), strict=True)
    ]
    return torch.stack(losses) / math.log(2)


def bits_per_byte(model: SharpForCausalLM, tokens: Tensor, length: int = VALIDATION_LENGTH) -> float:
    """The mean over all windows of `window_bits`."""
    return window_bits(model, tokens, length).mean().item()


def check_reads_bytes(model: Model) -> SharpForCausalLM:
    """`model`, which is to read a text.

    Raises:
        InputError: it is no language model, or its tokens are not bytes.
    """
    if not isinstance(model, SharpForCausalLM) or model.config.tokenizer != "bytes":
        raise InputError(f"a text is for language models over bytes; this is a {type(model).__name__} of another kind")
    return model


def read_text(path: Path | None) -> Tensor:
    """The tokens int16 [tokens] of a UTF-8 file; None is the part of the demo's book that is held out in training.

    Raises:
        NotFoundError: there is no such file, or the book cannot be had.
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
