"""The attention metrics as Prometheus families, made from the sums of `HeadStatistics` when they are read.

A Prometheus object per head would cost a Python call per head and token.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from sharp.plugins.manifest import Manifest
from sharp.serving.config import MetricsConfig
from sharp.serving.metrics.dispersion import LEAST_CONTEXT
from sharp.serving.metrics.heads import HeadSnapshot, HeadStatistics

HEAD = ("model", "layer", "head")
FLUSH_SECONDS = 2.0
ALL_HEADS = "all"


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


class AttentionCollector(Collector):
    """Shows the attention statistics of all models."""

    def __init__(self) -> None:
        self.models: list[AttentionModel] = []

    def describe(self) -> Iterator[Metric]:
        """Nothing: the registry needs no names in advance, and must not wait for them."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """The metrics now, with everything that was put before."""
        if not self.models:
            return
        views = []
        for model in self.models:
            model.heads.flush(FLUSH_SECONDS)
            views.append(_View(model, model.heads.snapshot()))
        yield self._gauge(
            "sharp_attention_series_limited",
            "1 when there are more heads than --attention-series-limit, and series are per layer with head=all.",
            (([view.name], float(view.model.limited)) for view in views),
            labels=HEAD[:1],
        )
        left_out = CounterMetricFamily(
            "sharp_attention_left_out_tokens",
            "Tokens of collected steps that no attention metric counts: adding up was behind, or they were not finite.",
            labels=HEAD[:1],
            unit="tokens",
        )
        for view in views:
            left_out.add_metric([view.name], view.snapshot.left_out_tokens)
        yield left_out
        yield self._histogram(views)
        yield from self._gauges(views)
        yield from self._dispersion(views)

    def _histogram(self, views: "list[_View]") -> Metric:
        family = HistogramMetricFamily(
            "sharp_attention_entropy_nats", "Entropy of the attention weights of a token.", labels=HEAD, unit="nats"
        )
        for view in views:
            bounds = [*(str(float(bound)) for bound in view.model.heads.bounds), "+Inf"]
            cumulative = view.summed(view.snapshot.counts).cumsum(-1).tolist()
            entropy = view.summed(view.snapshot.entropy)
            for layer, head, labels in view.series():
                buckets = list(zip(bounds, cumulative[layer][head], strict=True))
                family.add_metric(labels, buckets, entropy[layer, head])
        return family

    def _gauges(self, views: "list[_View]") -> Iterator[Metric]:
        for name, description, unit in (
            ("normalized_entropy", "Mean of entropy / ln(visible keys): 1 is uniform.", ""),
            ("support_ratio", "Mean share of the visible keys that have weight.", "ratio"),
            ("inverse_temperature", "Mean factor on the logits.", ""),
            ("logit_spread", "Mean of the largest minus the smallest logit.", ""),
        ):
            values = (
                sample
                for view in views
                if view.snapshot.recent is not None
                for sample in view.samples(getattr(view.snapshot.recent, name))
            )
            yield self._gauge(f"sharp_attention_{name}", f"{description} Over the last collected steps.", values, unit)

    def _dispersion(self, views: "list[_View]") -> Iterator[Metric]:
        yield self._gauge(
            "sharp_attention_smoothed_normalized_entropy",
            f"Exponentially weighted mean of entropy / ln(visible keys) of tokens that see over {LEAST_CONTEXT} keys.",
            (sample for view in views for sample in view.samples(view.snapshot.smoothed)),
        )
        yield self._gauge(
            "sharp_attention_dispersion_context_tokens",
            "Context length beyond which the smoothed normalized entropy is above --dispersion-threshold.",
            (sample for view in views for sample in view.samples(view.snapshot.crossing, np.fmin.reduce)),
            "tokens",
        )
        yield self._gauge(
            "sharp_attention_dispersed_heads",
            "Heads whose smoothed normalized entropy has been above --dispersion-threshold for --dispersion-tokens.",
            (
                ([view.name, str(layer)], float(count))
                for view in views
                for layer, count in enumerate(view.snapshot.dispersed.sum(-1))
            ),
            labels=HEAD[:2],
        )
        yield self._gauge(
            "sharp_attention_drift_psi",
            "Population stability index of entropy / ln(visible keys) against --attention-baseline; 0.25 is large.",
            (
                sample
                for view in views
                if view.snapshot.drift is not None
                for sample in view.samples(view.snapshot.drift, np.fmax.reduce)
            ),
        )
        family = SummaryMetricFamily(
            "sharp_attention_context_normalized_entropy",
            "Entropy / ln(visible keys) of a token and head, by visible keys: up to `context`, over half of it.",
            labels=("model", "layer", "context"),
        )
        for view in views:
            snapshot = view.snapshot
            for (layer, index), total in np.ndenumerate(snapshot.context_sums):
                labels = [view.name, str(layer), str(view.model.heads.contexts[index])]
                family.add_metric(labels, int(snapshot.context_counts[index]), float(total))
        yield family

    def _gauge(
        self,
        name: str,
        description: str,
        samples: Iterable[tuple[list[str], float]],
        unit: str = "",
        labels: tuple[str, ...] = HEAD,
    ) -> Metric:
        family = GaugeMetricFamily(name, description, labels=labels, unit=unit)
        for values, value in samples:
            family.add_metric(values, value)
        return family


@dataclass(frozen=True)
class _View:
    """The numbers of a model at the level of its series: a head, or a layer whose heads are one."""

    model: AttentionModel
    snapshot: HeadSnapshot

    @property
    def name(self) -> str:
        return self.model.manifest.name

    def summed(self, values: NDArray[Any]) -> NDArray[Any]:
        """[layers, heads, ...] -> [layers, series, ...]."""
        return values if self.model.per_head else values.sum(1, keepdims=True)

    def samples(
        self, values: NDArray[np.float64], over_heads: Callable[..., Any] = np.mean
    ) -> Iterator[tuple[list[str], float]]:
        """(labels, value) of [layers, heads], without those that are NaN: nothing is known of them yet."""
        if not self.model.per_head:
            values = over_heads(values, axis=-1, keepdims=True)
        for layer, head, labels in self.series():
            value = float(values[layer, head])
            if not np.isnan(value):
                yield labels, value

    def series(self) -> Iterator[tuple[int, int, list[str]]]:
        heads = self.model.manifest.q_heads if self.model.per_head else 1
        for layer in range(self.model.manifest.layers):
            for head in range(heads):
                yield layer, head, [self.name, str(layer), str(head) if self.model.per_head else ALL_HEADS]
