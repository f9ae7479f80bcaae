"""How well a decoder predicts a text: what a norm that it was not trained with costs."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import files
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from sharp.exporter.checkpoints.decoder import Decoder
from sharp.exporter.verification.comparison import Tokens
from sharp.exporter.verification.greedy_decoding import Append
from sharp.models.attention import EagerAttention
from sharp.models.config import SharpConfig
from sharp.plugins.errors import InputError, NotFoundError

MOST_TOKENS = 1024
QUANTIZED_TOKENS = 4096  # what quantization costs is small beside how much short texts vary
WINDOW = 2048  # PyTorch holds the weights of a whole window
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


@dataclass(frozen=True)
class TextPrediction:
    """How well the written model predicts `tokens` tokens of the text in one runtime, and the reference the same ones.

    The reference is PyTorch, or another runtime of the same quantized weights. `may_fall` allows any lower perplexity.
    """

    runtime: str
    tokens: int
    perplexity: float
    reference: str
    reference_perplexity: float
    relative_error: float
    tolerance: float
    may_fall: bool

    @property
    def passed(self) -> bool:
        """The error is within the tolerance (a nan is not)."""
        return self.relative_error <= self.tolerance and (self.may_fall or self.relative_error >= -self.tolerance)

    @property
    def difference(self) -> str:
        """What differs where, for a message."""
        return f"the perplexity of the text ({self.runtime}): {self.perplexity:.3f}, off by {self.relative_error:+.2%}"


def read_tokens(text: Path | None, tokenizer: Path, vocab_size: int, most: int = MOST_TOKENS) -> tuple[str, Tensor]:
    """The name of a text and its first tokens int64 [up to `most`]; None is this package's licence.

    Raises:
        NotFoundError: there is no such file.
        InputError: it is not UTF-8, has less than two tokens, or one that a model of `vocab_size` tokens does not know.
    """
    path = text or licence()
    check_text(path)
    try:
        content = path.read_text(encoding="utf-8")
    except ValueError as error:
        raise InputError(f"text {path} is not UTF-8; give another file with --text") from error
    reader = Tokenizer.from_file(str(tokenizer))
    reader.no_padding()
    reader.no_truncation()
    # Far more characters than the tokens need: a tokenizer is slow on a whole book.
    ids = reader.encode(content[: 32 * most]).ids[:most]
    if len(ids) < 2:
        raise InputError(f"text {path} has less than two tokens; give a longer file with --text")
    if max(ids) >= vocab_size:
        raise InputError(
            f"text {path} has token id {max(ids)}, which the tokenizer knows and the model, of {vocab_size} tokens, "
            "does not; give another file with --text"
        )
    return path.name, torch.tensor(ids)


def check_text(path: Path) -> None:
    """Check that there is a file.

    Raises:
        NotFoundError: there is none.
    """
    if not path.is_file():
        what = "is no regular file" if path.exists() else "does not exist"
        raise NotFoundError(f"text {path} {what}; give a file with --text")


def licence() -> Path:
    """The licence that comes with Sharp: a text that every installation has.

    Raises:
        NotFoundError: it is not installed.
    """
    for file in files("sharp-attention") or ():
        if file.name == "LICENSE":
            return Path(str(file.locate()))
    raise NotFoundError("the licence that comes with Sharp is not installed; give a text with --text")


def window_of(config: SharpConfig) -> int:
    """The tokens of a text that are read together: no more than the model saw in training."""
    return min(config.trained_context, WINDOW)


@torch.no_grad()
def text_losses(decoder: Decoder, tokens: Tensor) -> Tensor:
    """Cross entropies of int64 [tokens] but the first of every window of `window_of`."""
    config = decoder.config
    losses: list[Tensor] = []
    for window in tokens.split(window_of(config)):
        positions = torch.arange(len(window))[None]
        hidden = decoder.hidden_states(window[None], positions, EagerAttention(config))[0, :-1]
        for rows, following in zip(hidden.split(LOGITS_ROWS), window[1:].split(LOGITS_ROWS), strict=True):
            losses.append(functional.cross_entropy(decoder.logits(rows), following, reduction="none"))
    return torch.cat(losses)


def perplexity(losses: Tensor) -> float:
    """Exponential of the mean cross entropy."""
    # Above what a float holds the model says nothing anyway.
    return math.exp(min(losses.double().mean().item(), 700.0))


def runtime_losses(begin: Callable[[int], Append], tokens: Tokens, window: int, step: int) -> Tensor:
    """`text_losses` in a runtime, which reads `step` tokens at a time; `begin` starts a sequence of so many tokens."""
    losses: list[Tensor] = []
    for start in range(0, len(tokens), window):
        part = tokens[start : start + window]
        append = begin(len(part))
        for row in range(0, len(part) - 1, step):
            read = part[row : min(row + step, len(part) - 1)]
            following = torch.from_numpy(part[row + 1 : row + 1 + len(read)])
            losses.append(functional.cross_entropy(torch.from_numpy(append(read)), following, reduction="none"))
    return torch.cat(losses)
