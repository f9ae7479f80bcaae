"""How well a decoder predicts a text: what a norm that it was not trained with costs."""

import math
from dataclasses import dataclass
from importlib.metadata import files
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from sharp.exporter.decoder import Decoder
from sharp.models.attention import EagerAttention
from sharp.plugins.errors import InputError, NotFoundError

MOST_TOKENS = 1024
LOGITS_ROWS = 128  # of a large vocabulary, a gigabyte for a whole text


@dataclass(frozen=True)
class Perplexity:
    """Perplexity of a text under the norm that the checkpoint was trained with, and under the one exported."""

    text: str
    tokens: int
    trained_norm: str
    norm: str
    before: float
    after: float


def read_tokens(text: Path | None, tokenizer: Path) -> tuple[str, Tensor]:
    """The name of a text and its first tokens int64 [tokens]; None is this package's licence.

    Raises:
        NotFoundError: there is no such file.
        InputError: it is not UTF-8, or has less than two tokens.
    """
    path = text or _licence()
    if not path.is_file():
        raise NotFoundError(f"text {path} does not exist; give a file with --text")
    try:
        content = path.read_text(encoding="utf-8")
    except ValueError as error:
        raise InputError(f"text {path} is not UTF-8; give another file with --text") from error
    # Far more characters than the tokens need: a tokenizer is slow on a whole book.
    ids = Tokenizer.from_file(str(tokenizer)).encode(content[: 32 * MOST_TOKENS]).ids[:MOST_TOKENS]
    if len(ids) < 2:
        raise InputError(f"text {path} has less than two tokens; give a longer file with --text")
    return path.name, torch.tensor(ids)


def _licence() -> Path:
    for file in files("sharp-attention") or ():
        if file.name == "LICENSE":
            return Path(str(file.locate()))
    raise NotFoundError("the licence that comes with Sharp is not installed; give a text with --text")


@torch.no_grad()
def perplexity(decoder: Decoder, tokens: Tensor) -> float:
    """Exponential of the mean cross entropy of tokens int64 [tokens], in windows as long as the trained context."""
    config = decoder.config
    losses: list[Tensor] = []
    for window in tokens.split(config.trained_context):
        positions = torch.arange(len(window))[None]
        hidden = decoder.hidden_states(window[None], positions, EagerAttention(config))[0, :-1]
        for rows, wanted in zip(hidden.split(LOGITS_ROWS), window[1:].split(LOGITS_ROWS), strict=True):
            losses.append(functional.cross_entropy(decoder.logits(rows), wanted, reduction="none"))
    # Above what a float holds the model says nothing anyway.
    return math.exp(min(torch.cat(losses).mean().item(), 700.0))
