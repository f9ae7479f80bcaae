"""The attention metrics, written from the sums of `HeadStatistics` when the metrics are read."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sharp.core.manifest import Manifest
from sharp.serving.config import MetricsConfig
from sharp.serving.observability.metrics.dispersion import LEAST_CONTEXT
from sharp.serving.observability.metrics.exposition import Family, labelled, template
from sharp.serving.observability.metrics.heads import HeadSnapshot, HeadStatistics

FLUSH_SECONDS = 2.0
FLOAT32 = "%.9g"  # all digits of a float32, in a third of the time for all digits of a float64
ALL_HEADS = "all"
MOST_DISPERSED = 16  # number of heads that always have their own series
ENTROPY = "sharp_attention_entropy_nats"
CONTEXT = "sharp_attention_context_normalized_entropy"


@dataclass(frozen=True)
class AttentionModel:
    """A model that has attention metrics, with the statistics of its heads and the labels of its series.

    Do not make one if `config.attention_metrics` is "off".
    """

    manifest: Manifest
    config: MetricsConfig
    heads: HeadStatistics

    @property
    def limited(self) -> bool:
        """Whether series per head were requested, but the model has more heads than may have their own series."""
        heads = self.manifest.layers * self.manifest.q_heads
        return self.config.attention_metrics == "head" and heads > self.config.attention_series_limit

    @property
    def per_head(self) -> bool:
        """Whether every head has its own series. Otherwise series are per layer."""
        return self.config.attention_metrics == "head" and not self.limited

    @cached_property
    def with_heads(self) -> "AttentionModel":
        """A copy of this model with series per head."""
        return replace(self, config=replace(self.config, attention_metrics="head"))

    @cached_property
    def labels(self) -> str:
        """The label `model="NAME"` of all series of this model, as it stands between the braces of a line."""
        return labelled(model=self.manifest.name)

    @cached_property
    def layers(self) -> tuple[str, ...]:
        """The labels `model` and `layer` of the series of each layer, as they stand between the braces of a line."""
        return tuple(f"{self.labels},{labelled(layer=str(layer))}" for layer in range(self.manifest.layers))

    @cached_property
    def series(self) -> tuple[str, ...]:
        """The labels of each series, as they stand between the braces of a line.

        They are in the order of the layers and, if series are per head, of the heads of each layer.
        """
        heads = [str(head) for head in range(self.manifest.q_heads)] if self.per_head else [ALL_HEADS]
        return tuple(f"{layer},{labelled(head=head)}" for layer in self.layers for head in heads)

    @cached_property
    def histogram(self) -> str:
        """The text of the entropy histogram's lines in `/metrics`, with `%` placeholders for the values.

        The lines of a series are adjacent, as OpenMetrics requires.
        """
        bounds = [labelled(le=bound) for bound in (*(str(float(bound)) for bound in self.heads.bounds), "+Inf")]
        return "".join(
            template(f"{ENTROPY}_bucket", tuple(f"{labels},{bound}" for bound in bounds))
            + template(f"{ENTROPY}_count", (labels,))
            + template(f"{ENTROPY}_sum", (labels,))
            for labels in self.series
        )

    @cached_property
    def by_context(self) -> str:
        """The text of the lines of normalized entropy by context length, with `%` placeholders for the values."""
        ranges = [labelled(context=str(bound)) for bound in self.heads.contexts.tolist()]
        each = [f"{layer},{context}" for layer in self.layers for context in ranges]
        return "".join(template(f"{CONTEXT}_count", (row,)) + template(f"{CONTEXT}_sum", (row,)) for row in each)


@dataclass(frozen=True)
class _View:
    """A model with a snapshot of its numbers. Every public method but `summed` returns lines of `/metrics`."""

    model: AttentionModel
    snapshot: HeadSnapshot

    def summed(self, values: NDArray[Any]) -> NDArray[Any]:
        """Sum values [layers, heads, ...] over the heads of a series: [layers, series of a layer, ...]."""
        return values if self.model.per_head else values.sum(1, keepdims=True)

    def gauge(self, name: str, values: NDArray[np.float64] | None, over_heads: Callable[..., Any] = np.mean) -> str:
        """Return the lines of a gauge of values [layers, heads]; an empty text for None.

        NaN means not known yet, and has no line. `over_heads`, called as np.mean, makes the value of a layer if there
        is one series per layer.
        """
        if values is None:
            return ""
        if not self.model.per_head:
            values = over_heads(values, axis=-1, keepdims=True)
        known = ~np.isnan(values.ravel())
        series = tuple(compress(self.model.series, known))
        return template(name, series, FLOAT32) % tuple(values.ravel()[known].tolist())

    def histogram(self) -> str:
        """Return the lines of the entropy histogram."""
        counts = self.summed(self.snapshot.counts).cumsum(-1)  # [layers, series of a layer, buckets]
        rows = counts.reshape(-1, counts.shape[-1]).tolist()
        sums = self.summed(self.snapshot.entropy).ravel().tolist()
        return self.model.histogram % tuple(
            value for row, total in zip(rows, sums, strict=True) for value in (*row, row[-1], total)
        )

    def by_context(self) -> str:
        """Return the lines of the summary of normalized entropy by context length."""
        counts = self.snapshot.context_counts.tolist() * len(self.model.layers)
        sums = self.snapshot.context_sums.ravel().tolist()
        return self.model.by_context % tuple(chain.from_iterable(zip(counts, sums, strict=True)))

    def most_dispersed(self, name: str) -> str:
        """Return the lines of the heads whose recent normalized entropy is highest."""
        recent = self.snapshot.recent
        values = np.full((1, 1), np.nan) if recent is None else recent.normalized_entropy
        flat = np.where(np.isnan(values), -np.inf, values).ravel()
        highest = [at for at in np.argsort(-flat, kind="stable")[:MOST_DISPERSED].tolist() if flat[at] > -np.inf]
        places = [divmod(at, values.shape[1]) for at in highest]
        labels = tuple(f"{self.model.layers[layer]},{labelled(head=str(head))}" for layer, head in places)
        return template(name, labels, FLOAT32) % tuple(flat[highest].tolist())

    def dispersed(self, name: str) -> str:
        """Return the lines of the number of dispersed heads per layer."""
        return template(name, self.model.layers) % tuple(self.snapshot.dispersed.sum(-1).tolist())

    def query_heads(self, name: str) -> str:
        """Return the lines of the number of query heads per layer."""
        return template(name, self.model.layers) % ((self.model.manifest.q_heads,) * len(self.model.layers))

    def expected_dispersed(self, name: str) -> str:
        """Return the lines of the number of heads whose expected mean reaches the threshold; none if a mean is NaN."""
        expected = self.snapshot.expected
        if expected is None or np.isnan(expected).any():
            return ""
        above = expected >= self.model.config.dispersion_threshold
        return template(name, self.model.layers) % tuple(above.sum(-1).tolist())


Lines = Callable[[_View, str], str]


@dataclass(frozen=True)
class _Metric:
    """A metric of attention. `lines` writes the lines of a view under the metric's name."""

    name: str
    description: str
    lines: Lines
    kind: str = "gauge"


def _recent(field: str) -> Lines:
    """Return the function that writes a gauge of the recent window's statistic `field` [layers, heads]."""
    return lambda view, name: view.gauge(name, getattr(view.snapshot.recent, field, None))


def _of_heads(field: str, over_heads: Callable[..., Any] = np.mean) -> Lines:
    """Return the function that writes a gauge of the snapshot's `field` [layers, heads].

    `over_heads`, called as np.mean, combines the heads of a layer where one value per layer is shown.
    """
    return lambda view, name: view.gauge(name, getattr(view.snapshot, field), over_heads)


def _of_model(value: Callable[[_View], float], suffix: str = "") -> Lines:
    """Return the function that writes one number of the whole model; `suffix` follows the metric's name.

    `value` returns the number for the state of a model's metrics.
    """
    return lambda view, name: template(name + suffix, (view.model.labels,)) % value(view)


LATELY = "Over the last collected steps."
METRICS = (
    _Metric(
        "sharp_attention_series_limited",
        "1 when there are more heads than --attention-series-limit, and series are per layer with head=all.",
        _of_model(lambda view: int(view.model.limited)),
    ),
    _Metric(
        "sharp_attention_left_out_tokens",
        "Tokens of collected steps that no attention metric counts: adding up was behind, or they were not finite.",
        _of_model(lambda view: view.snapshot.left_out_tokens, "_total"),
        "counter",
    ),
    _Metric(ENTROPY, "Entropy of the attention weights of a token.", lambda view, _: view.histogram(), "histogram"),
    _Metric(
        "sharp_attention_normalized_entropy",
        f"Mean of entropy / ln(visible keys): 1 is uniform. {LATELY}",
        _recent("normalized_entropy"),
    ),
    _Metric(
        "sharp_attention_support_ratio",
        f"Mean share of the visible keys that have weight. {LATELY}",
        _recent("support_ratio"),
    ),
    _Metric(
        "sharp_attention_inverse_temperature", f"Mean factor on the logits. {LATELY}", _recent("inverse_temperature")
    ),
    _Metric(
        "sharp_attention_logit_spread",
        f"Mean of the largest minus the smallest logit. {LATELY}",
        _recent("logit_spread"),
    ),
    _Metric(
        "sharp_attention_sink_mass",
        f"Mean share of the weights that the head's attention sink takes, of models with sinks. {LATELY}",
        _recent("sink_mass"),
    ),
    _Metric(
        "sharp_attention_unsharpened_ratio",
        "Share of recent rows whose entropy is beyond the reach of the adaptive temperature's polynomial.",
        _of_heads("unsharpened"),
    ),
    _Metric(
        "sharp_attention_smoothed_normalized_entropy",
        f"Exponentially weighted mean of entropy / ln(visible keys) of tokens that see over {LEAST_CONTEXT} keys.",
        _of_heads("smoothed"),
    ),
    _Metric(
        "sharp_attention_dispersion_context_tokens",
        "Context length beyond which the smoothed normalized entropy is above --dispersion-threshold.",
        _of_heads("crossing", np.fmin.reduce),
    ),
    _Metric(
        "sharp_attention_dispersed_heads",
        "Heads whose smoothed normalized entropy has been above --dispersion-threshold for --dispersion-tokens.",
        _View.dispersed,
    ),
    _Metric("sharp_attention_heads", "Query heads of a layer.", _View.query_heads),
    _Metric(
        "sharp_attention_expected_normalized_entropy",
        "Mean of entropy / ln(visible keys) that the export measured, of contexts as long as those served now.",
        _of_heads("expected"),
    ),
    _Metric(
        "sharp_attention_expected_dispersed_heads",
        "Heads whose mean in the export is above --dispersion-threshold, of contexts as long as those served now.",
        _View.expected_dispersed,
    ),
    _Metric(
        "sharp_attention_most_dispersed_normalized_entropy",
        f"The {MOST_DISPERSED} highest means of entropy / ln(visible keys) of heads, over the last collected steps.",
        _View.most_dispersed,
    ),
    _Metric(
        "sharp_attention_drift_psi",
        "Population stability index of entropy / ln(visible keys) against --attention-baseline; 0.25 is large.",
        _of_heads("drift", np.fmax.reduce),
    ),
    _Metric(
        CONTEXT,
        "Entropy / ln(visible keys) of a token and head, by context length: up to `context`, over half of it.",
        lambda view, _: view.by_context(),
        "summary",
    ),
)


def attention_families(models: list[AttentionModel]) -> Iterator[Family]:
    """Yield the current metrics of all models, including all rows that were put before."""
    views = []
    for model in models:
        model.heads.flush(FLUSH_SECONDS)
        views.append(_View(model, model.heads.snapshot()))
    for metric in METRICS if views else ():
        lines = "".join(metric.lines(view, metric.name) for view in views)
        yield Family(metric.name, metric.kind, metric.description, lines)
