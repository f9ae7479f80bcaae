"""`Baseline`: the distribution of every head's entropy on a corpus. `Drift`: the distance of live tokens from it."""

from pathlib import Path
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sharp.core.manifest import Manifest
from sharp.core.regular_file import read_regular_file
from sharp.serving.api.attention import AttentionRows, normalized
from sharp.serving.api.errors import InputError, NotFoundError
from sharp.serving.observability.metrics.dispersion import LEAST_CONTEXT, context_bounds

MOST_BYTES = 2**26  # of a baseline

BINS = 10
# Fewer live tokens than this are no distribution, because the tokens of a single text are alike.
LEAST_TOKENS = 1024
# A range of contexts has no deciles if the corpus has fewer tokens than this in the range.
LEAST_RANGE_TOKENS = 100
# Entropies are rounded to this many decimals. For a head with constant entropy, deciles would sort rounding errors.
DIGITS = 3
# Added to the count of every bin, of the corpus and of live tokens, because an empty bin has no logarithm.
SMOOTHING = 0.5


class Baseline(BaseModel):
    """The content of a file of `sharp baseline`; arrays are [layers][heads][ranges][...].

    Bins are between the deciles of H / ln n of a head over the tokens of a range of contexts, doubling as those of
    `Dispersion` do. A live token is compared with the deciles of its own range, so longer requests than before are no
    drift by themselves. Where many tokens have the same entropy (0, say) deciles coincide and bins are empty, so their
    counts are recorded, too.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    format_version: Literal[2] = 2
    model: str
    source_sha256: str
    norm: str
    corpus: str
    tokens: int = Field(ge=1)
    contexts: list[int] = Field(min_length=1, description="most visible keys in each range, over half of it")
    edges: list[list[list[list[float]]]]
    counts: list[list[list[list[int]]]]

    @model_validator(mode="after")
    def _shapes_agree(self) -> Self:
        """Check that edges and counts have entries for the same layers, heads and ranges, else raise ValueError."""
        heads = len(self.edges[0]) if self.edges else 0
        for name, table, width in (("edges", self.edges, BINS - 1), ("counts", self.counts, BINS)):
            ranges = [bins for layer in table for head in layer for bins in head]
            if (
                [len(layer) for layer in table] != [heads] * len(self.edges)
                or any(len(head) != len(self.contexts) for layer in table for head in layer)
                or any(len(bins) != width for bins in ranges)
                or not ranges
            ):
                raise ValueError(f"{name} must have {width} numbers for every layer, head and range")
        return self

    def write(self, path: Path) -> None:
        """Write the baseline as JSON to the file `path`, which is replaced."""
        path.write_text(self.model_dump_json() + "\n", encoding="utf-8")


def read_baseline(path: Path, manifest: Manifest) -> Baseline:
    """Read the baseline of a model.

    Raises:
        NotFoundError: there is no such file.
        InputError: the file is not a baseline, or is the baseline of another model.
    """
    if not path.is_file():
        raise NotFoundError(f"attention_baseline {path} does not exist; record one with sharp baseline")
    try:
        baseline = Baseline.model_validate_json(read_regular_file(path, MOST_BYTES))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise InputError(f"attention_baseline {path} is not a baseline: {where}: {first['msg']}") from error
    recorded = (baseline.source_sha256, baseline.norm, len(baseline.edges), len(baseline.edges[0]))
    if recorded != (manifest.source.sha256, manifest.norm.name, manifest.layers, manifest.q_heads):
        raise InputError(
            f"attention_baseline {path} was recorded for {baseline.model} with norm {baseline.norm}, "
            "not for this model; record one with sharp baseline"
        )
    return baseline


def ranged(rows: AttentionRows) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return H / ln n [layers, tokens, heads], rounded to DIGITS decimals, and each token's range of n, by upper bound.

    Only tokens that see more than LEAST_CONTEXT keys are included.
    """
    chosen = rows.positions >= LEAST_CONTEXT
    visible = rows.positions[chosen] + 1
    bounds = context_bounds(int(visible.max(initial=LEAST_CONTEXT)))
    return normalized(rows)[:, chosen].round(DIGITS), bounds[np.searchsorted(bounds, visible)]


def make_baseline(
    manifest: Manifest, corpus: str, values: NDArray[np.float64], ranges: NDArray[np.int64]
) -> Baseline | None:
    """Return the baseline of a corpus from the results of `ranged`, or None if no range has enough tokens.

    `values` are [layers, tokens, heads], and `ranges` has the range of context of each token.
    """
    found, tokens = np.unique(ranges, return_counts=True)
    contexts = found[tokens >= LEAST_RANGE_TOKENS].tolist()
    if not contexts:
        return None
    inner = np.linspace(0, 1, BINS + 1)[1:-1]
    parts = [values[:, ranges == bound] for bound in contexts]
    edges = [np.moveaxis(np.quantile(part, inner, axis=1), 0, -1).round(DIGITS + 1) for part in parts]
    counts = [count(part, some[:, None]) for part, some in zip(parts, edges, strict=True)]
    return Baseline(
        model=manifest.name,
        source_sha256=manifest.source.sha256,
        norm=manifest.norm.name,
        corpus=corpus,
        tokens=sum(part.shape[1] for part in parts),
        contexts=contexts,
        edges=np.stack(edges, axis=2).tolist(),
        counts=np.stack(counts, axis=2).tolist(),
    )


def count(values: NDArray[np.float64], edges: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the number of values [layers, tokens, heads] in each bin, [layers, heads, 10].

    Edges are [layers, tokens or 1, heads, 9]. A value equal to an edge counts in the bin below the edge.
    """
    bins = (values[..., None] > edges).sum(-1)  # [layers, tokens, heads]
    return np.stack([(bins == number).sum(1) for number in range(BINS)], axis=-1)


class Drift:
    """The population stability index of live tokens against a baseline: the sum of (p - q) ln(p / q) over bins.

    p is the share of live tokens in a bin, q the share expected from the corpus. A live token's weight halves with
    every `half_life` tokens after it. Tokens whose range of contexts is not in the baseline do not count. By convention
    an index up to 0.1 means no change, and an index of 0.25 or more a large change.
    """

    def __init__(self, baseline: Baseline, half_life: int) -> None:
        self._contexts = np.array(baseline.contexts)
        self._edges = np.array(baseline.edges)  # [layers, heads, ranges, 9]
        self._shares = _shares(np.array(baseline.counts, np.float64))  # [layers, heads, ranges, 10]
        self._half_life = half_life
        self._counts = np.zeros((*self._edges.shape[:2], BINS))
        self._tokens = np.zeros(len(self._contexts))  # [ranges]

    def add(self, rows: AttentionRows) -> None:
        """Add the tokens of one step to the decayed counts of live tokens; `rows` are the step's statistics."""
        values, ranges = ranged(rows)
        known = np.isin(ranges, self._contexts)
        which = np.searchsorted(self._contexts, ranges[known])
        decay = 0.5 ** (len(which) / self._half_life)
        edges = np.moveaxis(self._edges[:, :, which], 1, 2)  # [layers, tokens, heads, 9]
        self._counts = self._counts * decay + count(values[:, known], edges)
        self._tokens = self._tokens * decay + np.bincount(which, minlength=len(self._contexts))

    def index(self) -> NDArray[np.float64]:
        """Return the index [layers, heads]; NaN while there are too few tokens."""
        tokens = self._tokens.sum()
        if tokens < LEAST_TOKENS:
            return np.full(self._counts.shape[:2], np.nan)
        live = _shares(self._counts)
        expected = np.einsum("lhrb,r->lhb", self._shares, self._tokens / tokens)
        index: NDArray[np.float64] = ((live - expected) * np.log(live / expected)).sum(-1)
        return index


def _shares(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return counts [..., bins] as shares that add up to 1, smoothed so that none is 0."""
    smoothed = counts + SMOOTHING
    shares: NDArray[np.float64] = smoothed / smoothed.sum(-1, keepdims=True)
    return shares
