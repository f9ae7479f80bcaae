"""Measurements of teacher, raw swap and student: perplexity by position, entropy and support by head, retrieval."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sharp.exporter.adapt.student import Student
from sharp.exporter.adapt.training import LOGITS_ROWS
from sharp.exporter.verification.perplexity import perplexity
from sharp.models.adapted_model import Observer, attention_norms
from sharp.models.norms import get_norm
from sharp.plugins.op.torch_normalizers import attention_weights, entropy

WINDOWS = 6  # most windows of a text
TRIALS = 4  # prompts for each length and depth of a needle
HEAD_TOKENS = 512
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
WORDS = (" apple", " river", " table", " music", " winter", " silver", " garden", " doctor", " bridge", " yellow")
CHOICES = 8
FILLER = "The grass is green. The sky is blue. The sun is bright. Here we go. There and back again. "
NEEDLE = "The secret word is{word}. "
QUESTION = "\nQuestion: What is the secret word?\nAnswer: The secret word is"


def no_progress() -> None:
    """Do nothing. This is the function to call after each step for a caller that shows no progress."""


@torch.no_grad()
def token_losses(student: Student, windows: Tensor, on_window: Callable[[], None] = no_progress) -> Tensor:
    """Return the cross entropies in nats, float32 [windows, length - 1] on the CPU, of ids int64 [windows, length].

    `on_window` is called after each window.
    """
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
        on_window()
    return torch.stack(losses).cpu()


def by_position(losses: Tensor, start: int = 0) -> list[dict[str, float]]:
    """Return the perplexity by position of losses [windows, positions], in rows that end at positions 64, 128, 256, ...

    A row has the entries from (the first position, 1-based), to (the position after the last) and perplexity, where
    position i is that of losses[:, i - 1]. The first `start` positions are left out. The first row is no shorter than
    half of `start`, unless the losses end before.
    """
    rows, end = [], 64
    while start < losses.shape[1]:
        while 2 * end < 3 * start:
            end *= 2
        last = min(end, losses.shape[1])
        rows.append({"from": start + 1, "to": last + 1, "perplexity": perplexity(losses[:, start:last])})
        start, end = last, 2 * end
    return rows


def context_windows(tokens: Tensor, usual: int, longest: int) -> list[Tensor]:
    """Return the windows int64 [windows, length] at the beginning of a text int64 [n] for perplexities by position.

    The first are up to two windows of `usual` tokens; the second, if the text goes on, is one of `longest` tokens.
    """
    found = [windows_of(tokens, min(usual, longest), 2)]
    return found + ([windows_of(tokens, longest, 1)] if min(longest, len(tokens)) > usual else [])


def along_context(
    student: Student, tokens: Tensor, usual: int, longest: int, on_window: Callable[[], None] = no_progress
) -> list[dict[str, float]]:
    """Return the rows of `by_position` for a text int64 [n], from windows at its beginning.

    Positions up to `usual` are from up to two windows, later ones from one window of `longest` tokens. `on_window` is
    called after each window.
    """
    losses = [token_losses(student, windows, on_window) for windows in context_windows(tokens, usual, longest)]
    return by_position(losses[0]) + (by_position(losses[1], usual - 1) if len(losses) > 1 else [])


def windows_of(tokens: Tensor, length: int, most: int = WINDOWS) -> Tensor:
    """Split a text [n], n > 0, into up to `most` adjoining windows [windows, length] from its beginning.

    A text shorter than `length` is one window.
    """
    length = min(length, len(tokens))
    count = max(1, min(most, len(tokens) // length))
    return tokens[: count * length].view(count, length)


@dataclass
class HeadFigures:
    """The entropy in nats and the support of every head, as means over the tokens of a text, [layers][heads]."""

    entropy: list[list[float]]
    support: list[list[float]]  # keys with a weight, as a share of the visible keys

    @property
    def mean_support(self) -> float:
        """The mean support over all heads, as a share (0 to 1) of the visible keys."""
        return sum(map(sum, self.support)) / sum(map(len, self.support))

    @property
    def mean_entropy(self) -> float:
        """The mean entropy over all heads, in nats."""
        return sum(map(sum, self.entropy)) / sum(map(len, self.entropy))


def head_statistics(query: Tensor, key: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return entropy in nats and share of the visible keys that have a weight [q_heads, queries] of the first sequence.

    `query` is [batch, q_heads, queries, head_dim], `key` [batch, kv_heads, keys, head_dim]. `options` are the keyword
    arguments of `normalized_attention`, of which scale, softcap and window must be there; attention is causal unless
    there is a mask. If there are fewer queries than keys, the queries are at the last positions.
    """
    scheme = get_norm(options.get("norm", "softmax"))
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    logits = query.float() @ key.float().mT * (options["scale"] or query.shape[-1] ** -0.5)
    if options["softcap"]:
        logits = options["softcap"] * torch.tanh(logits / options["softcap"])
    queries, keys = query.shape[2], key.shape[2]
    position = torch.arange(keys - queries, keys, device=query.device)
    distance = torch.arange(keys, device=query.device)[None] - position[:, None]
    visible = distance <= 0
    if options["window"] >= 0:
        visible &= distance > -options["window"]
    if options.get("mask") is not None:  # the mask includes causality and window
        visible = options["mask"][0].expand(query.shape[1], queries, keys)
    given = {
        name: options[name]
        for name in ("alpha", "head_params", "temperature_coefficients", "entropy_threshold", "sinks")
        if options.get(name) is not None
    }
    weights = attention_weights(scheme.normalizer, logits, visible, **given)[0]  # [heads, queries, keys]
    return entropy(weights), (weights > 0).sum(-1) / visible.sum(-1)


Record = Callable[[int, tuple[int, ...], Tensor, Tensor], None]


@contextmanager
def observed_heads(model: nn.Module, record: Record) -> Iterator[None]:
    """Call record(layer, heads, entropies, supports) at every attention call inside the context.

    `layer` is 0-based, `heads` are the query heads of the call; `entropies` (nats) and `supports` (share of the visible
    keys) are [heads, queries], see `head_statistics`. A layer whose heads have two norms makes two attention calls.
    """
    norms = attention_norms(model)

    def observer_of(layer: int) -> Observer:
        """Return the function that records entropy and support of the layer's heads when its attention is computed."""
        return lambda heads, query, key, _value, options: record(layer, heads, *head_statistics(query, key, options))

    for layer, norm in enumerate(norms):
        norm.observer = observer_of(layer)
    try:
        yield
    finally:
        for norm in norms:
            norm.observer = None


@torch.no_grad()
def head_figures(student: Student, tokens: Tensor) -> HeadFigures:
    """Measure entropy and support of every head over the first 512 tokens (or the context) of a text int64 [n]."""
    config = student.decoder.config
    found = HeadFigures(*([[0.0] * config.q_heads for _ in range(config.layers)] for _ in range(2)))

    def record(layer: int, heads: tuple[int, ...], entropies: Tensor, supports: Tensor) -> None:
        """Keep the mean entropy (nats) and support of each of the layer's heads."""
        for head, nats, share in zip(heads, entropies.mean(-1).tolist(), supports.mean(-1).tolist(), strict=True):
            found.entropy[layer][head], found.support[layer][head] = nats, share

    with observed_heads(student.model, record):
        tokens = tokens[None, : min(HEAD_TOKENS, config.max_context)]
        student.hidden(tokens.to(next(student.model.parameters()).device))
    return found


def needle_lengths(context: int, length: int) -> tuple[int, ...]:
    """Return half of `length`, `length`, and twice `length`, without repetitions.

    `length` is that of training sequences. Each result is at least 64 and at most the model's `context`, in tokens.
    """
    return tuple(dict.fromkeys(min(context, max(64, tokens)) for tokens in (length // 2, length, 2 * length)))


@torch.no_grad()
def retrieval(
    student: Student, lengths: tuple[int, ...], on_step: Callable[[], None], trials: int = TRIALS
) -> list[dict[str, float]]:
    """Count how often the right word among eight is the likeliest, by length of the text and depth of the needle.

    A row has the entries tokens (the length), depth (from 0 to 1), right and trials. There is one for every length and
    depth, after which `on_step` is called. Each word is represented by its first token. The list is empty if too few
    words differ in their first token, as with a tokenizer of bytes.
    """
    tokenizer = student.opened.tokenizer
    assert tokenizer is not None

    def ids(text: str) -> list[int]:
        """Return the token ids of a text without special tokens."""
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
