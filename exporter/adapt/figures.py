"""What is measured of teacher, raw swap and student: perplexity by position, every head, and retrieval."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sharp.exporter.adapt.student import Student
from sharp.exporter.adapt.training import LOGITS_ROWS
from sharp.exporter.verification.perplexity import perplexity
from sharp.models.adapted_model import attention_norms
from sharp.models.norms import get_norm
from sharp.plugins.ops.torch_normalizers import attention_weights, entropy

WINDOWS = 6  # of a text
HEAD_TOKENS = 512
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
WORDS = (" apple", " river", " table", " music", " winter", " silver", " garden", " doctor", " bridge", " yellow")
CHOICES = 8
FILLER = "The grass is green. The sky is blue. The sun is bright. Here we go. There and back again. "
NEEDLE = "The secret word is{word}. "
QUESTION = "\nQuestion: What is the secret word?\nAnswer: The secret word is"


@torch.no_grad()
def token_losses(student: Student, windows: Tensor) -> Tensor:
    """Cross entropies [windows, length - 1] of int64 [windows, length]."""
    device = next(student.model.parameters()).device
    losses = []
    for window in windows.split(1):
        ids = window.to(device)
        hidden, _ = student.hidden(ids)
        parts = zip(hidden[0, :-1].split(LOGITS_ROWS), ids[0, 1:].split(LOGITS_ROWS), strict=True)
        losses.append(
            torch.cat(
                [functional.cross_entropy(student.decoder.logits(a).float(), b, reduction="none") for a, b in parts]
            )
        )
    return torch.stack(losses).cpu()


def by_position(losses: Tensor, start: int = 0) -> list[dict[str, float]]:
    """Perplexity of the tokens behind the first `start`, in rows that end at positions 64, 128, 256 and so on.

    The first row is no shorter than half of `start`.
    """
    rows, end = [], 64
    while start < losses.shape[1]:
        while 2 * end < 3 * start:
            end *= 2
        last = min(end, losses.shape[1])
        rows.append({"from": start + 1, "to": last + 1, "perplexity": perplexity(losses[:, start:last])})
        start, end = last, 2 * end
    return rows


def along_context(student: Student, tokens: Tensor, usual: int, longest: int) -> list[dict[str, float]]:
    """Perplexity by position: of two windows of `usual` tokens, and behind these of one of `longest`."""
    rows = by_position(token_losses(student, windows_of(tokens, min(usual, longest), 2)))
    if min(longest, len(tokens)) > usual:
        rows += by_position(token_losses(student, windows_of(tokens, longest, 1)), usual - 1)
    return rows


def windows_of(tokens: Tensor, length: int, most: int = WINDOWS) -> Tensor:
    """Up to `most` windows [windows, length] of a text; a shorter text is one window."""
    length = min(length, len(tokens))
    count = max(1, min(most, len(tokens) // length))
    return tokens[: count * length].view(count, length)


@dataclass
class HeadFigures:
    """Means over the tokens of a text, [layers][heads]."""

    entropy: list[list[float]]
    support: list[list[float]]  # keys with a weight, as a share of those that are visible

    @property
    def mean_support(self) -> float:
        """Over all heads."""
        return sum(map(sum, self.support)) / sum(map(len, self.support))

    @property
    def mean_entropy(self) -> float:
        """Over all heads, in nats."""
        return sum(map(sum, self.entropy)) / sum(map(len, self.entropy))


@torch.no_grad()
def head_figures(student: Student, tokens: Tensor) -> HeadFigures:
    """Entropy and support of every head over a text."""
    found = HeadFigures([], [])

    def observe(query: Tensor, key: Tensor, options: dict[str, Any]) -> None:
        scheme = get_norm(options.get("norm", "softmax"))
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        scale = options["scale"] or query.shape[-1] ** -0.5
        logits = query.float() @ key.float().mT * scale
        if options["softcap"]:
            logits = options["softcap"] * torch.tanh(logits / options["softcap"])
        distance = torch.arange(key.shape[2])[None] - torch.arange(query.shape[2])[:, None]
        visible = (distance <= 0) & (distance > -options["window"] if options["window"] >= 0 else distance <= 0)
        visible = visible.to(query.device)
        given = {
            name: options[name]
            for name in ("alpha", "head_params", "temperature_coefficients", "entropy_threshold", "sinks")
            if options.get(name) is not None
        }
        weights = attention_weights(scheme.normalizer, logits, visible, **given)[0]  # [heads, queries, keys]
        found.entropy.append(entropy(weights).mean(-1).tolist())
        found.support.append(((weights > 0).sum(-1) / visible.sum(-1)).mean(-1).tolist())

    norms = attention_norms(student.model)
    for norm in norms:
        norm.observer = observe
    try:
        most = min(HEAD_TOKENS, student.decoder.config.max_context)
        student.hidden(tokens[None, :most].to(next(student.model.parameters()).device))
    finally:
        for norm in norms:
            norm.observer = None
    return found


def needle_lengths(context: int, length: int) -> tuple[int, ...]:
    """Half the length of the adaptation, that length, and twice it; inside the model's context."""
    return tuple(dict.fromkeys(min(context, max(64, one)) for one in (length // 2, length, 2 * length)))


@torch.no_grad()
def retrieval(
    student: Student, lengths: tuple[int, ...], on_step: Callable[[], None], trials: int = 4
) -> list[dict[str, float]]:
    """How often the right word among eight is the likeliest, by length and depth of the needle.

    A word stands for its first token, and words are taken that differ in it; empty where the tokenizer, of bytes say,
    has too few of them.
    """
    tokenizer = student.opened.tokenizer
    assert tokenizer is not None

    def ids(text: str) -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    first = {ids(word)[0]: word for word in reversed(WORDS) if ids(word)}
    choices = list(first)[:CHOICES]
    if len(choices) < CHOICES:
        return []
    device = next(student.model.parameters()).device
    filler, question = ids(FILLER), ids(QUESTION)
    rows = []
    for length in lengths:
        for depth in DEPTHS:
            right = 0
            for trial in range(trials):
                expected = choices[(trial * 3 + round(depth * 10)) % len(choices)]
                needle = ids(NEEDLE.format(word=first[expected]))
                room = max(0, length - len(needle) - len(question))
                haystack = (filler * (room // len(filler) + 1))[:room]
                cut = len(filler) * round(depth * room / len(filler))
                prompt = torch.tensor([haystack[:cut] + needle + haystack[cut:] + question], device=device)
                hidden, _ = student.hidden(prompt)
                scores = student.decoder.logits(hidden[:, -1])[0, choices]
                right += int(choices[int(scores.argmax())] == expected)
            rows.append({"tokens": length, "depth": depth, "right": right, "trials": trials})
            on_step()
    return rows
