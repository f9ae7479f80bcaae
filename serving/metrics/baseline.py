"""`Baseline`: how the entropy of every head was distributed on a corpus. `Drift`: how far from it a server is."""

from pathlib import Path
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sharp.plugins.manifest import Manifest
from sharp.serving.attention import AttentionRows, normalized
from sharp.serving.errors import InputError, NotFoundError
from sharp.serving.metrics.dispersion import LEAST_CONTEXT

BINS = 10
# Fewer live tokens than this say nothing: ten bins of chance alone make an index of 9 / tokens.
LEAST_TOKENS = 256
# Of a head whose entropy never changes, deciles would sort rounding errors.
DIGITS = 3
# Added to every bin, of the corpus and of live tokens: an empty bin has no logarithm.
SMOOTHING = 0.5


class Baseline(BaseModel):
    """What `sharp baseline` writes; arrays are [layers][heads][...].

    Bins are between the deciles of H / ln n of a head over the tokens that see more than LEAST_CONTEXT keys. Where many
    tokens have the same entropy (0, say) deciles coincide and bins are empty, so their counts are recorded, too.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    format_version: Literal[1] = 1
    model: str
    source_sha256: str
    norm: str
    corpus: str
    tokens: int = Field(ge=1)
    edges: list[list[list[float]]]
    counts: list[list[list[int]]]

    @model_validator(mode="after")
    def _shapes_agree(self) -> Self:
        shapes = {(len(heads), BINS - 1) for heads in self.edges}
        if len(shapes) != 1 or any(len(edges) != BINS - 1 for heads in self.edges for edges in heads):
            raise ValueError("edges must be the same number of heads in every layer, with 9 edges each")
        if [[BINS] * len(heads) for heads in self.edges] != [[len(bins) for bins in heads] for heads in self.counts]:
            raise ValueError("counts must have 10 bins for every head of edges")
        return self

    def write(self, path: Path) -> None:
        """Write it to a file."""
        path.write_text(self.model_dump_json() + "\n", encoding="utf-8")


def read_baseline(path: Path, manifest: Manifest) -> Baseline:
    """Read the baseline of a model.

    Raises:
        NotFoundError: there is no such file.
        InputError: it is no baseline, or one of another model.
    """
    if not path.is_file():
        raise NotFoundError(f"attention_baseline {path} does not exist; record one with sharp baseline")
    try:
        baseline = Baseline.model_validate_json(path.read_bytes())
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


def normalized_beyond_least(rows: AttentionRows) -> NDArray[np.float64]:
    """H / ln n [layers, tokens, heads] of the tokens that see more than LEAST_CONTEXT keys, to DIGITS decimals."""
    return normalized(rows)[:, rows.positions >= LEAST_CONTEXT].round(DIGITS)


def make_baseline(manifest: Manifest, corpus: str, values: NDArray[np.float64]) -> Baseline:
    """The baseline of H / ln n [layers, tokens, heads] on a corpus."""
    inner = np.linspace(0, 1, BINS + 1)[1:-1]
    edges = np.moveaxis(np.quantile(values, inner, axis=1), 0, -1)  # [layers, heads, 9]
    return Baseline(
        model=manifest.name,
        source_sha256=manifest.source.sha256,
        norm=manifest.norm.name,
        corpus=corpus,
        tokens=values.shape[1],
        edges=edges.tolist(),
        counts=count(values, edges).tolist(),
    )


def count(values: NDArray[np.float64], edges: NDArray[np.float64]) -> NDArray[np.int64]:
    """How many of the values [layers, tokens, heads] are in each bin, [layers, heads, 10]; an edge is below its bin."""
    bins = (values[..., None] > edges[:, None]).sum(-1)  # [layers, tokens, heads]
    return np.stack([(bins == number).sum(1) for number in range(BINS)], axis=-1)


class Drift:
    """The population stability index of live tokens against a baseline, sum of (p - q) ln(p / q) over bins.

    A live token's weight halves with every `half_life` tokens after it. By custom an index up to 0.1 is no change and
    one from 0.25 on a large one.
    """

    def __init__(self, baseline: Baseline, half_life: int) -> None:
        self._edges = np.array(baseline.edges)
        self._expected = _shares(np.array(baseline.counts, np.float64))
        self._half_life = half_life
        self._counts = np.zeros_like(self._expected)
        self._tokens = 0.0

    def add(self, rows: AttentionRows) -> None:
        """Add the tokens of a step."""
        values = normalized_beyond_least(rows)
        tokens = values.shape[1]
        decay = 0.5 ** (tokens / self._half_life)
        self._counts = self._counts * decay + count(values, self._edges)
        self._tokens = self._tokens * decay + tokens

    def index(self) -> NDArray[np.float64]:
        """[layers, heads]; NaN while there are too few tokens."""
        if self._tokens < LEAST_TOKENS:
            return np.full(self._counts.shape[:2], np.nan)
        live = _shares(self._counts)
        index: NDArray[np.float64] = ((live - self._expected) * np.log(live / self._expected)).sum(-1)
        return index


def _shares(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    smoothed = counts + SMOOTHING
    shares: NDArray[np.float64] = smoothed / smoothed.sum(-1, keepdims=True)
    return shares
