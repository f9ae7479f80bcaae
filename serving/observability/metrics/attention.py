"""The attention metrics, made from the sums of `HeadStatistics` when they are read."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sharp.plugins.manifest import Manifest
from sharp.serving.config import MetricsConfig
from sharp.serving.observability.metrics.dispersion import LEAST_CONTEXT
from sharp.serving.observability.metrics.exposition import Family, labelled, template
from sharp.serving.observability.metrics.heads import HeadSnapshot, HeadStatistics

FLUSH_SECONDS = 2.0
FLOAT32 = "%.9g"  # all its digits, in a third of the time of all digits of a float64
ALL_HEADS = "all"
MOST_DISPERSED = 16  # heads with a series of their own in any case
ENTROPY = "sharp_attention_entropy_nats"
CONTEXT = "sharp_attention_context_normalized_entropy"


@dataclass(frozen=True)
class AttentionModel:
    """A model whose attention is watched; `config.attention_metrics` is not "off"."""

    manifest: Manifest
    config: MetricsConfig
    heads: HeadStatistics

    @property
    def limited(self) -> bool:
        """There are more heads than may have series of their own, though they were requested."""
        heads = self.manifest.layers * self.manifest.q_heads
        return self.config.attention_metrics == "head" and heads > self.config.attention_series_limit

    @property
    def per_head(self) -> bool:
        """Every head has series of its own; else they are per layer."""
        return self.config.attention_metrics == "head" and not self.limited

    @cached_property
    def with_heads(self) -> "AttentionModel":
        """The same with series per head."""
        return replace(self, config=replace(self.config, attention_metrics="head"))

    @cached_property
    def labels(self) -> str:
        """Those of the model alone."""
        return labelled(model=self.manifest.name)

    @cached_property
    def layers(self) -> tuple[str, ...]:
        """The labels of each layer."""
        return tuple(f"{self.labels},{labelled(layer=str(layer))}" for layer in range(self.manifest.layers))

    @cached_property
    def series(self) -> tuple[str, ...]:
        """The labels of each series: all heads of the first layer, then of the second ..."""
        heads = [str(head) for head in range(self.manifest.q_heads)] if self.per_head else [ALL_HEADS]
        return tuple(f"{layer},{labelled(head=head)}" for layer in self.layers for head in heads)

    @cached_property
    def histogram(self) -> str:
        """The template of the entropy; the lines of a series stand together, as OpenMetrics asks."""
        bounds = [labelled(le=bound) for bound in (*(str(float(bound)) for bound in self.heads.bounds), "+Inf")]
        return "".join(
            template(f"{ENTROPY}_bucket", tuple(f"{one},{bound}" for bound in bounds))
            + template(f"{ENTROPY}_count", (one,))
            + template(f"{ENTROPY}_sum", (one,))
            for one in self.series
        )

    @cached_property
    def by_context(self) -> str:
        """The template of the summary."""
        ranges = [labelled(context=str(bound)) for bound in self.heads.contexts.tolist()]
        each = [f"{layer},{one}" for layer in self.layers for one in ranges]
        return "".join(template(f"{CONTEXT}_count", (one,)) + template(f"{CONTEXT}_sum", (one,)) for one in each)


@dataclass(frozen=True)
class _View:
    """A model and its numbers; every method gives lines."""

    model: AttentionModel
    snapshot: HeadSnapshot

    def summed(self, values: NDArray[Any]) -> NDArray[Any]:
        """[layers, heads, ...] -> [layers, series of a layer, ...]."""
        return values if self.model.per_head else values.sum(1, keepdims=True)

    def gauge(self, name: str, values: NDArray[np.float64] | None, over_heads: Callable[..., Any] = np.mean) -> str:
        """Of [layers, heads], without those that are NaN: nothing is known of them yet."""
        if values is None:
            return ""
        if not self.model.per_head:
            values = over_heads(values, axis=-1, keepdims=True)
        known = ~np.isnan(values.ravel())
        series = tuple(compress(self.model.series, known))
        return template(name, series, FLOAT32) % tuple(values.ravel()[known].tolist())

    def histogram(self) -> str:
        """Of the entropy."""
        counts = self.summed(self.snapshot.counts).cumsum(-1)  # [layers, series of a layer, buckets]
        rows = counts.reshape(-1, counts.shape[-1]).tolist()
        sums = self.summed(self.snapshot.entropy).ravel().tolist()
        return self.model.histogram % tuple(
            value for row, total in zip(rows, sums, strict=True) for value in (*row, row[-1], total)
        )

    def by_context(self) -> str:
        """Of the summary."""
        counts = self.snapshot.context_counts.tolist() * len(self.model.layers)
        sums = self.snapshot.context_sums.ravel().tolist()
        return self.model.by_context % tuple(chain.from_iterable(zip(counts, sums, strict=True)))

    def most_dispersed(self, name: str) -> str:
        """Of the heads whose recent normalized entropy is highest."""
        recent = self.snapshot.recent
        values = np.full((1, 1), np.nan) if recent is None else recent.normalized_entropy
        flat = np.where(np.isnan(values), -np.inf, values).ravel()
        highest = [one for one in np.argsort(-flat, kind="stable")[:MOST_DISPERSED].tolist() if flat[one] > -np.inf]
        places = [divmod(one, values.shape[1]) for one in highest]
        labels = tuple(f"{self.model.layers[layer]},{labelled(head=str(head))}" for layer, head in places)
        return template(name, labels, FLOAT32) % tuple(flat[highest].tolist())

    def dispersed(self, name: str) -> str:
        """Of the number of dispersed heads."""
        return template(name, self.model.layers) % tuple(self.snapshot.dispersed.sum(-1).tolist())


def attention_families(models: list[AttentionModel]) -> Iterator[Family]:
    """The metrics of all models now, with everything that was put before."""
    if not models:
        return
    views = []
    for model in models:
        model.heads.flush(FLUSH_SECONDS)
        views.append(_View(model, model.heads.snapshot()))

    def family(name: str, kind: str, unit: str, description: str, lines: Callable[[_View, str], str]) -> Family:
        return Family(name, kind, unit, description, "".join(lines(view, name) for view in views))

    def of_model(suffix: str, value: Callable[[_View], float]) -> Callable[[_View, str], str]:
        return lambda view, name: template(name + suffix, (view.model.labels,)) % value(view)

    def recent(field: str) -> Callable[[_View, str], str]:
        return lambda view, name: view.gauge(name, getattr(view.snapshot.recent, field, None))

    yield family(
        "sharp_attention_series_limited",
        "gauge",
        "",
        "1 when there are more heads than --attention-series-limit, and series are per layer with head=all.",
        of_model("", lambda view: int(view.model.limited)),
    )
    yield family(
        "sharp_attention_left_out_tokens",
        "counter",
        "tokens",
        "Tokens of collected steps that no attention metric counts: adding up was behind, or they were not finite.",
        of_model("_total", lambda view: view.snapshot.left_out_tokens),
    )
    yield family(
        ENTROPY,
        "histogram",
        "nats",
        "Entropy of the attention weights of a token.",
        lambda view, _name: view.histogram(),
    )
    for field, unit, description in (
        ("normalized_entropy", "", "Mean of entropy / ln(visible keys): 1 is uniform."),
        ("support_ratio", "ratio", "Mean share of the visible keys that have weight."),
        ("inverse_temperature", "", "Mean factor on the logits."),
        ("logit_spread", "", "Mean of the largest minus the smallest logit."),
    ):
        description += " Over the last collected steps."
        yield family(f"sharp_attention_{field}", "gauge", unit, description, recent(field))
    yield family(
        "sharp_attention_sink_mass",
        "gauge",
        "",
        "Mean share of the weights that the head's attention sink takes, of models with sinks."
        " Over the last collected steps.",
        recent("sink_mass"),
    )
    yield family(
        "sharp_attention_unsharpened_ratio",
        "gauge",
        "ratio",
        "Share of recent rows whose entropy is beyond the reach of the adaptive temperature's polynomial.",
        lambda view, name: view.gauge(name, view.snapshot.unsharpened),
    )
    yield family(
        "sharp_attention_smoothed_normalized_entropy",
        "gauge",
        "",
        f"Exponentially weighted mean of entropy / ln(visible keys) of tokens that see over {LEAST_CONTEXT} keys.",
        lambda view, name: view.gauge(name, view.snapshot.smoothed),
    )
    yield family(
        "sharp_attention_dispersion_context_tokens",
        "gauge",
        "tokens",
        "Context length beyond which the smoothed normalized entropy is above --dispersion-threshold.",
        lambda view, name: view.gauge(name, view.snapshot.crossing, np.fmin.reduce),
    )
    yield family(
        "sharp_attention_dispersed_heads",
        "gauge",
        "",
        "Heads whose smoothed normalized entropy has been above --dispersion-threshold for --dispersion-tokens.",
        lambda view, name: view.dispersed(name),
    )
    yield family(
        "sharp_attention_most_dispersed_normalized_entropy",
        "gauge",
        "",
        f"The {MOST_DISPERSED} highest means of entropy / ln(visible keys) of heads, over the last collected steps.",
        lambda view, name: view.most_dispersed(name),
    )
    yield family(
        "sharp_attention_drift_psi",
        "gauge",
        "",
        "Population stability index of entropy / ln(visible keys) against --attention-baseline; 0.25 is large.",
        lambda view, name: view.gauge(name, view.snapshot.drift, np.fmax.reduce),
    )
    yield family(
        CONTEXT,
        "summary",
        "",
        "Entropy / ln(visible keys) of a token and head, by context length: up to `context`, over half of it.",
        lambda view, _name: view.by_context(),
    )
