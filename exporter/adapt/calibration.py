"""Start values of a student without training: for each head what changes its output least.

For each head, softmax's output o and the new norm's output o' are compared at queries whose positions are spread evenly
in ln n, so that the choice is for all lengths up to that of the sequence, and at queries of shorter sequences that
repeat spans of themselves (`with_recalls`), which heads that find something need. A head gets a factor of its logits
(under ssa: b and n), and a matrix that corrects its output (`mixing.py`). The error of a choice is |o' - o| / |o| over
queries that the correction was not computed from. Query heads that share a KV head are kept or changed together: a
softmax head reads all of its keys anyway.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sharp.core.errors import InputError
from sharp.exporter.adapt.measures import CALIBRATED
from sharp.exporter.adapt.mixing import OutputSums, takes_mixings
from sharp.exporter.adapt.student import Student
from sharp.models.adapted_model import attention_norms
from sharp.models.attention_chunks import by_head, by_key_head
from sharp.models.normalized_attention import normalized_attention
from sharp.plugins.op.torch_normalizers import attention_weights

CALIBRATION_VERSION = 2  # a run that began with another calibration cannot go on
FACTORS = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.65, 0.8, 1.0)
SSA_PAIRS = tuple((b, n) for n in (1.5, 2.0, 3.0, 5.0, 8.0) for b in (0.1, 0.2, 0.4, 0.7, 1.0))
CALIBRATED_NORMALIZERS = ("entmax", "ssa", "adaptive_softmax")  # normalizers that can be calibrated
QUERIES, FIRST_QUERY = 96, 64  # the queries by which a factor is chosen, and the first of them
MIXED_QUERIES, FIRST_MIXED_QUERY = 2048, 8  # the queries of a sequence that corrections are computed from, and checked
CHECKED = 4  # one query in four checks the correction instead
LARGER = 2  # a correction favours larger factors, so the next two are tried with it, too
CHUNK = 2**20  # most logits of a layer that exist at once, of which some copies exist
RECALL_QUERIES = 768  # queries of a sequence with recalls
RECALLED_FROM = 0.5  # the part of such a sequence in which it repeats itself begins here
RECALLED_TOKENS = (8, 32)  # tokens of one repeated span
SHORTER, SHORTER_SHARE = 4, 4  # sequences with recalls, and the share of the longest one's length of each, inverted


@dataclass(frozen=True)
class HeadCandidate:
    """A candidate for one head: the factor of its logits, or for norm ssa the pair (b, n)."""

    factor: float = 1.0
    ssa: tuple[float, float] | None = None


@dataclass(frozen=True)
class Calibration:
    """The best choice and its relative error, both [layers][q_heads], and the heads of each layer that keep softmax.

    The error of a choice is |o' - o| / |o| for the head's outputs o under softmax and o' under the norm, corrected by
    the head's matrix: the larger of the errors on plain text and on text with recalls. `mixings` are these matrices by
    layer, float32 [q_heads, dim, dim]; the tuple is empty if the model's output projections cannot take them. Heads
    keep softmax if the root mean square error of their group, the query heads of one KV head, is above `max_error`.
    `tokens` is the length of the longest sequence on which the choices were compared.
    """

    choices: tuple[tuple[HeadCandidate, ...], ...]
    errors: tuple[tuple[float, ...], ...]
    softmax_heads: tuple[tuple[int, ...], ...]
    max_error: float
    tokens: int
    mixings: tuple[Tensor, ...] = field(default=(), repr=False)

    @property
    def kept_share(self) -> float:
        """The share of all heads that keep softmax, from 0 to 1."""
        return sum(map(len, self.softmax_heads)) / sum(map(len, self.errors))

    def record(self) -> dict[str, Any]:
        """Return all but the matrices as values for JSON, with the entries kept_share and corrected."""
        fields = asdict(replace(self, mixings=()))
        del fields["mixings"]
        return fields | {"kept_share": self.kept_share, "corrected": bool(self.mixings)}


def check_calibrated(norm: str, normalizer: str) -> None:
    """Check that a norm has something to calibrate; `norm` is its name and `normalizer` the name of its normalizer.

    Raises:
        InputError: the norm's normalizer has no candidates.
    """
    if normalizer not in CALIBRATED_NORMALIZERS:
        raise InputError(f"--norm {norm} has nothing to calibrate; leave out --calibrate and --calibrate-only")


def candidates(normalizer: str) -> tuple[HeadCandidate, ...]:
    """Return the choices that are compared for every head: pairs (b, n) for ssa, factors for other normalizers."""
    if normalizer == "ssa":
        return tuple(HeadCandidate(ssa=pair) for pair in SSA_PAIRS)
    return tuple(HeadCandidate(factor) for factor in FACTORS)


@dataclass
class _Layer:
    """The facts about a layer: the candidates of its heads, and for each the sums of outputs to fit and to check.

    `tried` are [candidates][q_heads]; every candidate has the sums to compute corrections from, and those to check them
    on plain text and on text with recalls.
    """

    tried: list[list[HeadCandidate]]
    fitted: list[OutputSums]
    checked: list[OutputSums]
    recalled: list[OutputSums]


@torch.no_grad()
def calibrate(
    student: Student, tokens: Tensor, max_error: float, advance: Callable[[], None], longest: int = CALIBRATED
) -> Calibration:
    """Find the best choice of every head on parts of a text, without changing the student.

    Args:
        student: the student before training; only its teacher runs.
        tokens: int64 [n]; one sequence as long as the model's context and `longest` allow, and up to four sequences
            of a quarter of this length are used.
        max_error: the relative error above which a group of heads keeps softmax.
        advance: called once for every layer and sequence.
        longest: the most tokens of a sequence.
    """
    config = student.decoder.config
    layers: dict[int, _Layer] = {}
    corrects = takes_mixings(student.model, student.described.attention_modules)
    seen = 0

    def observe(_heads: tuple[int, ...], query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> None:
        """Choose the candidates of a layer on the first sequence, and add up the outputs of the candidates."""
        nonlocal seen
        layer = seen % config.layers
        rows = _Rows(student, query, key, value, options)
        if layer not in layers:
            layers[layer] = _begun(rows, corrects)
        _add(layers[layer], rows, recalls=seen >= config.layers)
        seen += 1
        advance()

    norms = attention_norms(student.model)
    for norm in norms:
        norm.observer = observe
    sequences = _sequences(tokens, min(config.max_context, longest))
    try:
        with student.teacher():
            for sequence in sequences:
                student.hidden(sequence[None].to(next(student.model.parameters()).device))
    finally:
        for norm in norms:
            norm.observer = None
    best = [_best(layers[layer], corrects) for layer in range(config.layers)]
    group = config.q_heads // config.kv_heads
    return Calibration(
        choices=tuple(tuple(choices) for choices, _, _ in best),
        errors=tuple(tuple(errors) for _, errors, _ in best),
        softmax_heads=tuple(_above(errors, group, max_error) for _, errors, _ in best),
        max_error=max_error,
        tokens=len(sequences[0]),
        mixings=tuple(mixing for _, _, mixing in best) if corrects else (),
    )


def _sequences(tokens: Tensor, longest: int) -> list[Tensor]:
    """Return the sequences of a calibration: the longest, then up to `SHORTER` with recalls, from evenly spaced places.

    `longest` is the most tokens of the first one.
    """
    longest = min(len(tokens), longest)
    short = longest // SHORTER_SHARE
    rest = tokens[longest:]
    count = min(SHORTER, len(rest) // short) if short else 0
    starts = [index * (len(rest) - short) // max(1, count - 1) for index in range(count)]
    generator = torch.Generator().manual_seed(0)
    return [tokens[:longest], *(with_recalls(rest[start : start + short], generator) for start in starts)]


def with_recalls(sequence: Tensor, generator: torch.Generator) -> Tensor:
    """Return a sequence int64 [n] whose second half is made of short spans from anywhere in its first half.

    A model predicts such a span after its first tokens by finding where it has read them. In ordinary text that is
    seldom needed, so the errors of heads on nothing else would not show whether they still find something.
    """
    found, half = sequence.clone(), int(len(sequence) * RECALLED_FROM)
    least, most = RECALLED_TOKENS
    begin = half
    while begin < len(found) and half > 0:
        size = int(torch.randint(least, most + 1, (1,), generator=generator))
        size = min(size, half, len(found) - begin)
        start = int(torch.randint(half - size + 1, (1,), generator=generator))
        found[begin : begin + size] = sequence[start : start + size]
        begin += size
    return found


def calibrated_lengths(tokens: int, longest: int) -> list[int]:
    """Return the lengths of the sequences of a calibration on a text of `tokens` tokens, at most `longest`."""
    return [len(sequence) for sequence in _sequences(torch.zeros(tokens, dtype=torch.int8), longest)]


def _begun(rows: "_Rows", corrects: bool) -> _Layer:
    """Choose the candidates of a layer's heads by the error without a correction.

    With corrections, the next larger factors are candidates, too.
    """
    tried = candidates(rows.student.described.scheme.normalizer)
    heads, dim = rows.query.shape[1], rows.value.shape[-1]
    squares = torch.zeros(len(tried), heads)
    for positions in rows.chunks(query_positions(rows.query.shape[2])):
        expected = rows.softmax(positions)
        found = rows.normed(positions, [[choice] * heads for choice in tried])
        squares += torch.stack([(each - expected).square().sum((1, 2)).cpu() for each in found])
    best = squares.min(0).indices.tolist()
    larger = LARGER if corrects and tried[0].ssa is None else 0
    steps = [[tried[min(index + step, len(tried) - 1)] for index in best] for step in range(larger + 1)]
    return _Layer(steps, *([OutputSums.empty(heads, dim) for _ in steps] for _ in range(3)))


def _add(layer: _Layer, rows: "_Rows", recalls: bool) -> None:
    """Add the outputs of a sequence's queries to the sums of a layer: one query in `CHECKED` to those that check.

    `recalls` says that the sequence repeats itself: then the queries are where it does.
    """
    length = rows.query.shape[2]
    positions = recall_positions(length) if recalls else query_positions(length, MIXED_QUERIES, FIRST_MIXED_QUERY)
    index = torch.arange(len(positions))
    checked = layer.recalled if recalls else layer.checked
    for part, sums in ((index % CHECKED > 0, layer.fitted), (index % CHECKED == 0, checked)):
        for some in rows.chunks(positions[part]):
            expected = rows.softmax(some)
            for own, found in zip(sums, rows.normed(some, layer.tried), strict=True):
                own.add(found, expected)


def _best(layer: _Layer, corrects: bool) -> tuple[list[HeadCandidate], list[float], Tensor]:
    """Return the best candidate of every head, its error, and its matrix, float32 [q_heads, dim, dim]."""
    heads, dim = layer.fitted[0].xx.shape[:2]
    same = torch.eye(dim, dtype=torch.float64).expand(heads, dim, dim)
    mixings = torch.stack([sums.solve() if corrects else same for sums in layer.fitted])
    errors = torch.stack(
        [
            torch.maximum(plain.errors(mixing), recalled.errors(mixing))
            for plain, recalled, mixing in zip(layer.checked, layer.recalled, mixings, strict=True)
        ]
    )
    best = errors.min(0)
    choices = [layer.tried[index][head] for head, index in enumerate(best.indices.tolist())]
    return choices, best.values.tolist(), mixings[best.indices, torch.arange(heads)].float()


def _above(errors: Sequence[float], group: int, most: float) -> tuple[int, ...]:
    """Return the heads of the groups, `group` neighbouring heads each, whose root mean square error is above `most`."""
    kept: list[int] = []
    for start in range(0, len(errors), group):
        own = errors[start : start + group]
        if not math.sqrt(sum(error**2 for error in own) / len(own)) <= most:  # NaN counts as above
            kept += range(start, start + len(own))
    return tuple(kept)


def query_positions(length: int, count: int = QUERIES, first: int = FIRST_QUERY) -> Tensor:
    """Return 0-based positions of queries, int64 [up to `count`], evenly spread in their logarithm up to the last.

    `length` is the number of tokens of the sequence. The first position is `first` - 1, or less in a short sequence.
    """
    begin = min(first, max(1, length // 4))  # keeps several lengths in short texts
    spread = torch.logspace(math.log10(begin), math.log10(length), count, dtype=torch.float64)
    return (spread.round().long() - 1).clamp(0, length - 1).unique()


def recall_positions(length: int) -> Tensor:
    """Return 0-based positions of queries, int64 [up to `RECALL_QUERIES`], where a sequence with recalls has them."""
    begin = int(length * RECALLED_FROM)
    return torch.linspace(begin, length - 1, min(RECALL_QUERIES, length - begin)).long()


def calibrated_passes(lengths: Sequence[int], candidates: int) -> list[float]:
    """Return how many causal attentions over each sequence's whole length have as many logits as its calibration has.

    `lengths` are those of `calibrated_lengths`; `candidates` is the number of choices that are compared for every head.
    """
    found = []
    for index, length in enumerate(lengths):
        whole = length * (length + 1) / 2
        mixed = recall_positions(length) if index else query_positions(length, MIXED_QUERIES, FIRST_MIXED_QUERY)
        logits = (LARGER + 1) * (mixed + 1).sum()
        logits += 0 if index else candidates * (query_positions(length) + 1).sum()
        found.append(float(logits / whole))
    return found


@dataclass(frozen=True)
class _Rows:
    """Query, key and value of a layer [1, heads, tokens, dim], with `options`, those of `normalized_attention`."""

    student: Student
    query: Tensor
    key: Tensor
    value: Tensor
    options: dict[str, Any]

    def chunks(self, positions: Tensor) -> Iterator[Tensor]:
        """Split ascending 0-based positions of queries, int64 [queries], so that a part has up to `CHUNK` logits."""
        start, heads = 0, self.query.shape[1]
        while start < len(positions):
            after = positions[start:] + 1
            logits = heads * after * torch.arange(1, len(after) + 1)
            end = start + max(1, int((logits <= CHUNK).sum()))
            yield positions[start:end]
            start = end

    def _seen(self, positions: Tensor) -> Tensor:
        """Return which keys, up to that of the last position, queries at `positions` see: bool [queries, keys]."""
        index = torch.arange(int(positions[-1]) + 1, device=positions.device)
        visible = index[None] <= positions[:, None]
        if self.options["window"] >= 0:
            visible &= index[None] > positions[:, None] - self.options["window"]
        return visible

    def softmax(self, positions: Tensor) -> Tensor:
        """Return the outputs [q_heads, queries, dim] under softmax of queries at ascending 0-based `positions`."""
        positions = positions.to(self.query.device)
        visible = self._seen(positions)
        keys = visible.shape[1]
        own = self.options | {"causal": False, "window": -1, "mask": visible[None, None]}
        return normalized_attention(self.query[:, :, positions], self.key[:, :, :keys], self.value[:, :, :keys], **own)[
            0
        ]

    def normed(self, positions: Tensor, tried: Sequence[Sequence[HeadCandidate]]) -> Iterator[Tensor]:
        """Yield the outputs [q_heads, queries, dim] under the student's norm for each of `tried`.

        Each of `tried` has one candidate for each query head.
        """
        described, options, query = self.student.described, self.options, self.query
        positions = positions.to(query.device)
        visible = self._seen(positions)
        q_heads, kv_heads, keys = query.shape[1], self.key.shape[1], visible.shape[1]
        scale = options["scale"] or query.shape[-1] ** -0.5
        products = by_key_head(query[:, :, positions].float(), kv_heads) @ self.key[:, :, :keys].float().mT
        logits = by_head(products, q_heads)[0] * scale
        if options["softcap"]:
            logits = options["softcap"] * torch.tanh(logits / options["softcap"])
        for choices in tried:
            factors = torch.tensor([choice.factor for choice in choices], device=query.device)
            pairs = [choice.ssa for choice in choices if choice.ssa is not None]
            weights = attention_weights(
                described.scheme.normalizer,
                logits * factors[:, None, None],
                visible,
                head_params=torch.tensor(pairs, device=query.device) if pairs else None,
                alpha=described.alpha,
                temperature_coefficients=described.temperature_coefficients,
                entropy_threshold=described.entropy_threshold,
                sinks=options["sinks"],
            )
            mixed = by_key_head(weights[None], kv_heads) @ self.value[:, :, :keys].float()
            yield by_head(mixed, q_heads)[0]


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
        if found.mixings:
            norm.mixing = found.mixings[norm.layer].to(device)
            norm.mixing[list(found.softmax_heads[norm.layer])] = torch.eye(norm.mixing.shape[-1], device=device)
    changed = replace(student, described=described)
    for parameter in changed.learned().values():
        parameter.requires_grad_()
    return changed
