"""The attention metrics, made from the sums of `HeadStatistics` when they are read."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sharp.plugins.manifest import Manifest
from sharp.serving.config import MetricsConfig
from sharp.serving.metrics.dispersion import LEAST_CONTEXT
from sharp.serving.metrics.exposition import Family, labelled, line
from sharp.serving.metrics.heads import HeadSnapshot, HeadStatistics

FLUSH_SECONDS = 2.0
ALL_HEADS = "all"
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
        """There are more heads than may have series of their own, though they were asked for."""
        heads = self.manifest.layers * self.manifest.q_heads
        return self.config.attention_metrics == "head" and heads > self.config.attention_series_limit

    @property
    def per_head(self) -> bool:
        """Every head has series of its own; else they are per layer."""
        return self.config.attention_metrics == "head" and not self.limited

    @cached_property
    def labels(self) -> str:
        """Those of the model alone."""
        return labelled(model=self.manifest.name)

    @cached_property
    def layers(self) -> list[str]:
        """The labels of each layer."""
        return [f"{self.labels},{labelled(layer=str(layer))}" for layer in range(self.manifest.layers)]

    @cached_property
    def series(self) -> list[str]:
        """The labels of each series: all heads of the first layer, then of the second ..."""
        heads = [str(head) for head in range(self.manifest.q_heads)] if self.per_head else [ALL_HEADS]
        return [f"{layer},{labelled(head=head)}" for layer in self.layers for head in heads]

    @cached_property
    def buckets(self) -> list[list[str]]:
        """How the line of each bucket of the entropy of each series begins."""
        bounds = [*(str(float(bound)) for bound in self.heads.bounds), "+Inf"]
        return [[f"{ENTROPY}_bucket{{{labels},{labelled(le=bound)}}}" for bound in bounds] for labels in self.series]


@dataclass(frozen=True)
class _View:
    """A model and its numbers."""

    model: AttentionModel
    snapshot: HeadSnapshot

    def summed(self, values: NDArray[Any]) -> NDArray[Any]:
        """[layers, heads, ...] -> [layers, series of a layer, ...]."""
        return values if self.model.per_head else values.sum(1, keepdims=True)

    def gauge(
        self, name: str, values: NDArray[np.float64] | None, over_heads: Callable[..., Any] = np.mean
    ) -> Iterator[str]:
        """Lines of [layers, heads], without those that are NaN: nothing is known of them yet."""
        if values is None:
            return
        if not self.model.per_head:
            values = over_heads(values, axis=-1, keepdims=True)
        for labels, value in zip(self.model.series, values.ravel().tolist(), strict=True):
            if value == value:  # not NaN
                yield line(name, labels, value)

    def histogram(self) -> Iterator[str]:
        """Lines of the entropy, those of a series together: OpenMetrics asks for that."""
        counts = self.summed(self.snapshot.counts).cumsum(-1)  # [layers, series of a layer, buckets]
        rows = counts.reshape(-1, counts.shape[-1]).tolist()
        sums = self.summed(self.snapshot.entropy).ravel().tolist()
        for labels, starts, row, total in zip(self.model.series, self.model.buckets, rows, sums, strict=True):
            for start, value in zip(starts, row, strict=True):
                yield f"{start} {value}"
            yield line(f"{ENTROPY}_count", labels, row[-1])
            yield line(f"{ENTROPY}_sum", labels, total)

    def by_context(self) -> Iterator[str]:
        """Lines of the summary."""
        for labels, sums in zip(self.model.layers, self.snapshot.context_sums.tolist(), strict=True):
            for bound, tokens, total in zip(
                self.model.heads.contexts.tolist(), self.snapshot.context_counts.tolist(), sums, strict=True
            ):
                whole = f"{labels},{labelled(context=str(bound))}"
                yield line(f"{CONTEXT}_count", whole, tokens)
                yield line(f"{CONTEXT}_sum", whole, total)

    def dispersed(self, name: str) -> Iterator[str]:
        """Lines of the number of dispersed heads."""
        counts = self.snapshot.dispersed.sum(-1).tolist()
        return (line(name, labels, count) for labels, count in zip(self.model.layers, counts, strict=True))


def attention_families(models: list[AttentionModel]) -> Iterator[Family]:
    """The metrics of all models now, with everything that was put before."""
    if not models:
        return
    views = []
    for model in models:
        model.heads.flush(FLUSH_SECONDS)
        views.append(_View(model, model.heads.snapshot()))

    def family(
        name: str, kind: str, unit: str, description: str, lines: Callable[[_View, str], Iterator[str]]
    ) -> Family:
        return Family(name, kind, unit, description, (one for view in views for one in lines(view, name)))

    def of_model(suffix: str, value: Callable[[_View], float]) -> Callable[[_View, str], Iterator[str]]:
        return lambda view, name: iter([line(name + suffix, view.model.labels, value(view))])

    def recent(field: str) -> Callable[[_View, str], Iterator[str]]:
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
