"""The perplexity of a text under a decoder, which shows the cost of a norm that the decoder was not trained with."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from sharp.core.errors import InputError, NotFoundError
from sharp.core.licence import licence
from sharp.exporter.sources.decoder import Decoder
from sharp.exporter.verification.comparison import Tokens
from sharp.exporter.verification.greedy_decoding import Append
from sharp.models.attention import EagerAttention
from sharp.models.config import SharpConfig

MOST_TOKENS = 1024
QUANTIZED_TOKENS = 4096  # quantization costs little, so its cost shows only on texts longer than MOST_TOKENS
WINDOW = 2048  # PyTorch holds the attention weights of a whole window in memory
LOGITS_ROWS = 128  # with a large vocabulary, the logits of a whole text would take a gigabyte


@dataclass(frozen=True)
class Perplexity:
    """The perplexity of a text under the trained norm (`before`) and under the exported norm (`after`)."""

    text: str
    tokens: int
    trained_norm: str
    norm: str
    before: float
    after: float


@dataclass(frozen=True)
class TextPrediction:
    """The perplexity of the text's first `tokens` tokens under the written model in one runtime, and under a reference.

    The reference is PyTorch, or another runtime with the same quantized weights. `relative_error` is the perplexity
    over that of the reference, minus 1. `may_fall` allows any lower perplexity.
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
        """Whether the error is within the tolerance; NaN never is."""
        return self.relative_error <= self.tolerance and (self.may_fall or self.relative_error >= -self.tolerance)

    @property
    def difference(self) -> str:
        """A phrase for messages: the runtime, its perplexity and the relative error."""
        return f"the perplexity of the text ({self.runtime}): {self.perplexity:.3f}, off by {self.relative_error:+.2%}"


def read_tokens(text: Path | None, tokenizer: Path, vocab_size: int, most: int = MOST_TOKENS) -> tuple[str, Tensor]:
    """Return the name of a text and its first tokens, int64 of at most `most`. Without `text`, read Sharp's licence.

    `tokenizer` is the path of a tokenizer.json, which must exist and be valid.

    Raises:
        NotFoundError: the text is no file.
        InputError: the text is not UTF-8, has less than two tokens, or has a token id of `vocab_size` or more.
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
    # A tokenizer is slow on a whole book, so it gets far more characters than needed, but not all.
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
    """Check that the text at `path` is a file.

    Raises:
        NotFoundError: there is no such file, or `path` is no regular file.
    """
    if not path.is_file():
        what = "is no regular file" if path.exists() else "does not exist"
        raise NotFoundError(f"text {path} {what}; give a file with --text")


def window_of(config: SharpConfig) -> int:
    """Return the number of tokens of a text that are read together, at most the trained context."""
    return min(config.trained_context, WINDOW)


@torch.no_grad()
def text_losses(decoder: Decoder, tokens: Tensor) -> Tensor:
    """Return the cross entropy in nats of each of int64 [tokens], except for the first of each window (`window_of`)."""
    config = decoder.config
    losses: list[Tensor] = []
    for window in tokens.split(window_of(config)):
        positions = torch.arange(len(window))[None]
        hidden = decoder.hidden_states(window[None], positions, EagerAttention(config))[0, :-1]
        for rows, following in zip(hidden.split(LOGITS_ROWS), window[1:].split(LOGITS_ROWS), strict=True):
            losses.append(functional.cross_entropy(decoder.logits(rows), following, reduction="none"))
    return torch.cat(losses)


def perplexity(losses: Tensor) -> float:
    """Return the exponential of the mean cross entropy in nats, at most e^700; NaN if a loss is NaN."""
    # math.exp overflows above 709; a model with such losses predicts nothing anyway.
    return math.exp(min(losses.double().mean().item(), 700.0))


def runtime_losses(begin: Callable[[int], Append], tokens: Tokens, window: int, step: int) -> Tensor:
    """Return the same losses as `text_losses`, computed by a runtime.

    `begin` starts a sequence of a given number of tokens, and returns a function that appends int64 [n] and returns the
    logits [n, vocab]. The runtime reads every `window` tokens as a sequence, `step` tokens at a time.
    """
    losses: list[Tensor] = []
    for start in range(0, len(tokens), window):
        part = tokens[start : start + window]
        append = begin(len(part))
        for row in range(0, len(part) - 1, step):
            read = part[row : min(row + step, len(part) - 1)]
            following = torch.from_numpy(part[row + 1 : row + 1 + len(read)])
            losses.append(functional.cross_entropy(torch.from_numpy(append(read)), following, reduction="none"))
    return torch.cat(losses)
