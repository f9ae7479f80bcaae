"""The attention metrics: statistics of every layer and head, from the kernels' own numbers.

A Prometheus object per head would cost a Python call per head and token. Here everything is one array over
layers and heads, and series are made from it when `/metrics` is read.
"""

import logging
import queue
import threading
from collections import deque
from collections.abc import Iterator

import numpy as np
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from sharp.plugins.manifest import Manifest
from sharp.serving.attention import ENTROPY, AttentionRows, AttentionTotals, add_up
from sharp.serving.config import MetricsConfig

logger = logging.getLogger(__name__)

ENTROPY_BUCKETS = np.array([0.1, 0.25, 0.5, 1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10])
LABELS = ("model", "layer", "head")
QUEUED_STEPS = 4
FLUSH_SECONDS = 2.0


class AttentionMetrics(Collector):
    """Adds up attention statistics in a thread of its own and shows them when asked."""

    def __init__(self, manifest: Manifest, config: MetricsConfig) -> None:
        self._model = manifest.name
        self._per_head = manifest.layers * manifest.q_heads <= config.attention_series_limit
        heads = manifest.q_heads if self._per_head else 1
        self._counts = np.zeros((manifest.layers, heads, len(ENTROPY_BUCKETS) + 1), np.int64)
        self._entropy = np.zeros((manifest.layers, heads))
        self._window: deque[AttentionTotals] = deque(maxlen=config.attention_window)
        self._lock = threading.Lock()
        # A full queue makes the engine wait: no row is ever left out, and memory stays bounded.
        self._queue: queue.Queue[AttentionRows | None] = queue.Queue(QUEUED_STEPS)
        self._idle = threading.Condition()
        self._pending = 0
        self._thread = threading.Thread(target=self._run, name="attention-metrics", daemon=True)
        self._thread.start()

    def put(self, rows: AttentionRows) -> None:
        """Add the rows of a step, later."""
        with self._idle:
            self._pending += 1
        self._queue.put(rows)

    def close(self) -> None:
        """End the thread after what is queued."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (rows := self._queue.get()) is not None:
            try:
                self._add(rows)
            except Exception:
                logger.exception("attention statistics of a step could not be added up")
            with self._idle:
                self._pending -= 1
                self._idle.notify_all()

    def _add(self, rows: AttentionRows) -> None:
        layers, heads, buckets = self._counts.shape
        entropy = rows.stats[..., ENTROPY]  # [layers, tokens, q_heads]
        bucket = np.searchsorted(ENTROPY_BUCKETS, entropy, side="left")  # le: a value on the bound is inside
        series = np.arange(layers)[:, None, None] * heads + (np.arange(heads) if self._per_head else 0)
        counts = np.bincount((series * buckets + bucket).ravel(), minlength=self._counts.size)
        totals = add_up(rows)
        if not self._per_head:
            width = rows.stats.shape[2]
            totals = AttentionTotals(
                totals.tokens * width, totals.tokens_past_first * width, totals.sums.sum(-1, keepdims=True)
            )
        with self._lock:
            self._counts += counts.reshape(self._counts.shape)
            self._entropy += totals.sums[0]
            self._window.append(totals)

    def collect(self) -> Iterator[HistogramMetricFamily | GaugeMetricFamily]:
        """The metrics now, with everything that was put before."""
        with self._idle:
            self._idle.wait_for(lambda: self._pending == 0, FLUSH_SECONDS)
        with self._lock:
            counts, entropy, window = self._counts.copy(), self._entropy.copy(), list(self._window)
        limited = GaugeMetricFamily(
            "sharp_attention_series_limited",
            "1 when there are more heads than --attention-series-limit, and series are per layer with head=all.",
            labels=LABELS[:1],
        )
        limited.add_metric([self._model], float(not self._per_head))
        yield limited
        yield self._histogram(counts, entropy)
        yield from self._gauges(window)

    def describe(self) -> Iterator[HistogramMetricFamily | GaugeMetricFamily]:
        """Nothing: the registry needs no names in advance, and must not wait for them."""
        return iter(())

    def _histogram(self, counts: np.ndarray, entropy: np.ndarray) -> HistogramMetricFamily:
        family = HistogramMetricFamily(
            "sharp_attention_entropy_nats", "Entropy of the attention weights of a token.", labels=LABELS
        )
        bounds = [*(str(float(bound)) for bound in ENTROPY_BUCKETS), "+Inf"]
        cumulative = counts.cumsum(-1).tolist()
        for layer, head, labels in self._series():
            family.add_metric(labels, list(zip(bounds, cumulative[layer][head], strict=True)), entropy[layer, head])
        return family

    def _gauges(self, window: list[AttentionTotals]) -> Iterator[GaugeMetricFamily]:
        if not window:
            return
        total = window[0]
        for totals in window[1:]:
            total = total + totals
        summary = total.summary()
        for name, description, values in (
            ("normalized_entropy", "Mean of entropy / ln(visible keys): 1 is uniform.", summary.normalized_entropy),
            ("support_ratio", "Mean share of the visible keys that have weight.", summary.support_ratio),
            ("inverse_temperature", "Mean factor on the logits.", summary.inverse_temperature),
            ("logit_spread", "Mean of the largest minus the smallest logit.", summary.logit_spread),
        ):
            family = GaugeMetricFamily(
                f"sharp_attention_{name}", f"{description} Over the last collected steps.", labels=LABELS
            )
            for layer, head, labels in self._series():
                value = values[layer, head]
                if not np.isnan(value):  # no token saw more than one key yet
                    family.add_metric(labels, float(value))
            yield family

    def _series(self) -> Iterator[tuple[int, int, list[str]]]:
        layers, heads, _ = self._counts.shape
        for layer in range(layers):
            for head in range(heads):
                yield layer, head, [self._model, str(layer), str(head) if self._per_head else "all"]
