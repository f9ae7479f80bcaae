"""Start values of a student without training: per head the factor, or SSA's b and n, that changes its output least.

For each head, softmax's output o and the new norm's output o' are compared at queries whose positions are spread evenly
in ln n over one long sequence, so that the choice is for all lengths up to its own. The error of a choice is
|o' - o| / |o| over these queries. Query heads that share a KV head are kept or changed together: a softmax head reads
all of its keys anyway.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sharp.core.errors import InputError
from sharp.exporter.adapt.student import Student
from sharp.models.adapted_model import attention_norms
from sharp.models.normalized_attention import normalized_attention
from sharp.plugins.op.torch_normalizers import attention_weights

FACTORS = (0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.65, 0.8, 1.0)
SSA_PAIRS = tuple((b, n) for n in (1.5, 2.0, 3.0, 5.0, 8.0) for b in (0.1, 0.2, 0.4, 0.7, 1.0))
CALIBRATED = ("entmax", "ssa", "adaptive_softmax")  # normalizers that can be calibrated
QUERIES, FIRST_QUERY = 96, 64
ROWS = 16  # queries whose logits exist at once
LONGEST = 8192  # most tokens of the sequence, even if the model's context is longer


@dataclass(frozen=True)
class HeadCandidate:
    """A candidate for one head: the factor of its logits, or for norm ssa the pair (b, n)."""

    factor: float = 1.0
    ssa: tuple[float, float] | None = None


@dataclass(frozen=True)
class Calibration:
    """The best choice and its relative error, both [layers][q_heads], and the heads of each layer that keep softmax.

    The error of a choice is |o' - o| / |o| for the head's outputs o under softmax and o' under the norm. Heads keep
    softmax if the root mean square error of their group, the query heads of one KV head, is above `max_error`. `tokens`
    is the length of the sequence on which the choices were compared.
    """

    choices: tuple[tuple[HeadCandidate, ...], ...]
    errors: tuple[tuple[float, ...], ...]
    softmax_heads: tuple[tuple[int, ...], ...]
    max_error: float
    tokens: int

    @property
    def kept_share(self) -> float:
        """The share of all heads that keep softmax, from 0 to 1."""
        return sum(map(len, self.softmax_heads)) / sum(map(len, self.errors))


def check_calibrated(norm: str, normalizer: str) -> None:
    """Check that a norm has something to calibrate; `norm` is its name and `normalizer` the name of its normalizer.

    Raises:
        InputError: the norm's normalizer has no candidates.
    """
    if normalizer not in CALIBRATED:
        raise InputError(f"--norm {norm} has nothing to calibrate; leave out --calibrate and --calibrate-only")


def candidates(normalizer: str) -> tuple[HeadCandidate, ...]:
    """Return the choices that are compared for every head: pairs (b, n) for ssa, factors for other normalizers."""
    if normalizer == "ssa":
        return tuple(HeadCandidate(ssa=pair) for pair in SSA_PAIRS)
    return tuple(HeadCandidate(factor) for factor in FACTORS)


@torch.no_grad()
def calibrate(student: Student, tokens: Tensor, max_error: float, advance: Callable[[], None]) -> Calibration:
    """Find the best choice of every head on the first tokens of a text, without changing the student.

    Args:
        student: the student before training; only its teacher runs.
        tokens: int64 [n]; at most the model's context and 8,192 of them are used.
        max_error: the relative error above which a group of heads keeps softmax.
        advance: called once for every layer.
    """
    config, described = student.decoder.config, student.described
    length = min(len(tokens), config.max_context, LONGEST)
    tried = candidates(described.scheme.normalizer)
    errors: list[Tensor] = []

    def observe(_heads: tuple[int, ...], query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> None:
        """Measure the errors of all candidates for a layer, from its query, key and value."""
        errors.append(_errors(query, key, value, options, student, tried))
        advance()

    norms = attention_norms(student.model)
    for norm in norms:
        norm.observer = observe
    try:
        with student.teacher():
            student.hidden(tokens[None, :length].to(next(student.model.parameters()).device))
    finally:
        for norm in norms:
            norm.observer = None
    best = [found.min(0) for found in errors]
    group = config.q_heads // config.kv_heads
    return Calibration(
        choices=tuple(tuple(tried[index] for index in minimum.indices.tolist()) for minimum in best),
        errors=tuple(tuple(minimum.values.tolist()) for minimum in best),
        softmax_heads=tuple(_above(minimum.values.tolist(), group, max_error) for minimum in best),
        max_error=max_error,
        tokens=length,
    )


def _above(errors: Sequence[float], group: int, most: float) -> tuple[int, ...]:
    """Return the heads of the groups, `group` neighbouring heads each, whose root mean square error is above `most`."""
    kept: list[int] = []
    for start in range(0, len(errors), group):
        own = errors[start : start + group]
        if not math.sqrt(sum(error**2 for error in own) / len(own)) <= most:  # NaN counts as above
            kept += range(start, start + len(own))
    return tuple(kept)


def query_positions(length: int) -> Tensor:
    """Return 0-based positions of queries, int64 [up to QUERIES], evenly spread in their logarithm up to the last.

    `length` is the number of tokens of the sequence.
    """
    first = min(FIRST_QUERY, max(1, length // 4))  # keeps several lengths in short texts
    spread = torch.logspace(math.log10(first), math.log10(length), QUERIES, dtype=torch.float64)
    return (spread.round().long() - 1).clamp(0, length - 1).unique()


def _errors(
    query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any], student: Student, tried: Sequence[HeadCandidate]
) -> Tensor:
    """Return the relative errors [choices, q_heads] of a layer's output, against softmax with `options`.

    `tried` are the norms to choose among, in the order of the result.
    """
    described = student.described
    positions = query_positions(query.shape[2]).to(query.device)
    squares = torch.zeros(len(tried), query.shape[1])
    total = torch.zeros(query.shape[1])
    group = query.shape[1] // key.shape[1]
    for rows in positions.split(ROWS):
        keys = int(rows[-1]) + 1
        visible = torch.arange(keys, device=query.device)[None] <= rows[:, None]
        if options["window"] >= 0:
            visible &= torch.arange(keys, device=query.device)[None] > rows[:, None] - options["window"]
        own = options | {"causal": False, "window": -1, "mask": visible[None, None]}
        expected = normalized_attention(query[:, :, rows], key[:, :, :keys], value[:, :, :keys], **own)[0]
        total += expected.square().sum((1, 2)).cpu()
        wide_key, wide_value = (tensor[0, :, :keys].repeat_interleave(group, 0).float() for tensor in (key, value))
        scale = options["scale"] or query.shape[-1] ** -0.5
        logits = query[0, :, rows].float() @ wide_key.mT * scale
        if options["softcap"]:
            logits = options["softcap"] * torch.tanh(logits / options["softcap"])
        for index, choice in enumerate(tried):
            weights = attention_weights(
                described.scheme.normalizer,
                logits * choice.factor,
                visible,
                head_params=None if choice.ssa is None else torch.tensor(choice.ssa).expand(query.shape[1], 2),
                alpha=described.alpha,
                temperature_coefficients=described.temperature_coefficients,
                entropy_threshold=described.entropy_threshold,
                sinks=options["sinks"],
            )
            squares[index] += (weights @ wide_value - expected).square().sum((1, 2)).cpu()
    return (squares / total.clamp(min=1e-30)).sqrt()


@torch.no_grad()
def start_from(student: Student, found: Calibration) -> Student:
    """Set the choices of a calibration as start values, and softmax in the heads that keep it.

    The norms of `student.model` are changed in place. The returned student shares this model and has the new
    description; use it in place of `student`.
    """
    described = replace(student.described, softmax_heads=found.softmax_heads if found.kept_share else ())
    device = next(student.model.parameters()).device
    for norm, choices in zip(attention_norms(student.model), found.choices, strict=True):
        before = None if norm.query_scale is None else norm.log_scale
        norm.describe(described)
        norm.to(device)
        own, _ = described.heads_of(norm.layer)
        if norm.head_parameters is not None:
            pairs = [choice.ssa or (1.0, 1.0) for choice in choices]
            norm.head_parameters.fill_heads(torch.tensor(pairs, device=device))
        assert norm.log_scale is not None
        for head in own:
            # `before` undoes the factor with which a length scale starts.
            undone = 0.0 if before is None else float(before[head])
            norm.log_scale[head] = math.log(choices[head].factor) + undone
        if norm.query_scale is not None:
            for name, parameter in norm.query_scale.named_parameters():
                parameter.fill_(math.log(2) if name == "beta" else 0.0)
    changed = replace(student, described=described)
    for parameter in changed.learned().values():
        parameter.requires_grad_()
    return changed
