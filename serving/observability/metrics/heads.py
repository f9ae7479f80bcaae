"""`HeadStatistics`: the attention statistics of every layer and head of one model, added up beside the engine."""

import logging
import threading
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sharp.plugins.manifest import Manifest
from sharp.plugins.temperature_range import largest_sharpened
from sharp.serving.api.attention import ENTROPY, AttentionRows, AttentionSummary, AttentionTotals, add_up, normalized
from sharp.serving.config import MIB, MetricsConfig
from sharp.serving.observability.metrics.baseline import Drift, read_baseline
from sharp.serving.observability.metrics.dispersion import Dispersion, context_bounds

logger = logging.getLogger(__name__)

MOST_PENDING_BYTES = 16 * MIB


def entropy_buckets(max_context: int) -> NDArray[np.float64]:
    """Upper bounds in nats up to ln(max_context), which no entropy exceeds; finer where heads are sharp."""
    fine = [0.1, 0.25, 0.5, 1, 1.5, 2, 2.5, 3]
    highest = float(np.ceil(np.log(max_context)))
    return np.array([*(bound for bound in fine if bound < highest), *np.arange(min(4, highest), highest + 1)])


@dataclass(frozen=True)
class HeadSnapshot:
    """What was collected so far.

    Attributes:
        counts: int64 [layers, heads, buckets], tokens by entropy; the last bucket is above all bounds.
        entropy: float64 [layers, heads], the sum over the same tokens.
        context_sums: float64 [layers, ranges], the sum of H / ln n over tokens and heads, by context length.
        context_counts: int64 [ranges], how many values each of them is the sum of.
        recent: means over the last collected steps; None before the first.
        smoothed: float64 [layers, heads], see `Dispersion`; so are `dispersed` and `crossing`.
        drift: float64 [layers, heads], see `Drift`; None without a baseline.
        unsharpened: float64 [layers, heads], the share of recent rows beyond their adaptive temperature's reach; NaN
            where a head has none; None before the first step.
        left_out_tokens: tokens that are in none of these.
    """

    counts: NDArray[np.int64]
    entropy: NDArray[np.float64]
    context_sums: NDArray[np.float64]
    context_counts: NDArray[np.int64]
    recent: AttentionSummary | None
    smoothed: NDArray[np.float64]
    dispersed: NDArray[np.bool_]
    crossing: NDArray[np.float64]
    drift: NDArray[np.float64] | None
    unsharpened: NDArray[np.float64] | None
    left_out_tokens: int


def reach_of_heads(manifest: Manifest) -> NDArray[np.float64]:
    """The entropy [layers, heads] beyond which a head's adaptive temperature does nothing; NaN where it has none."""
    reach = np.full((manifest.layers, manifest.q_heads), np.nan)
    if manifest.norm.normalizer == "adaptive_softmax":
        reach[:] = largest_sharpened(manifest.norm.temperature_coefficients)
    for one in manifest.norm.heads:
        adaptive = one.normalizer == "adaptive_softmax"
        reach[one.layer, list(one.heads)] = largest_sharpened(one.temperature_coefficients) if adaptive else np.nan
    return reach


class HeadStatistics:
    """Adds up attention statistics in a thread of its own.

    The engine never waits for it. Rows that it has not come to yet may fill MOST_PENDING_BYTES; while they do, the rows
    of a step are left out and counted. What is shown are samples of every n-th step anyway, and to add a step up at
    once in the engine's thread would cost the time that waiting costs.
    """

    def __init__(self, manifest: Manifest, config: MetricsConfig) -> None:
        """Begin.

        Raises:
            SharpError: the baseline cannot be used.
        """
        self.bounds = entropy_buckets(manifest.max_context)
        self.contexts = context_bounds(manifest.max_context)
        layers, heads = manifest.layers, manifest.q_heads
        self._counts = np.zeros((layers, heads, len(self.bounds) + 1), np.int64)
        self._entropy = np.zeros((layers, heads))
        self._context_sums = np.zeros((layers, len(self.contexts)))
        self._context_counts = np.zeros(len(self.contexts), np.int64)
        self._recent: deque[AttentionTotals] = deque(maxlen=config.attention_window)
        self._reach = reach_of_heads(manifest)
        self._unsharpened: deque[tuple[NDArray[np.int64], int]] = deque(maxlen=config.attention_window)
        self._dispersion = Dispersion(layers, heads, self.contexts, config)
        path = config.attention_baseline
        self._drift = None if path is None else Drift(read_baseline(path, manifest), config.drift_half_life)
        self._not_finite_tokens = 0
        self._sums_lock = threading.Lock()

        self._pending: deque[AttentionRows] = deque()
        self._pending_bytes = 0
        self._refused_tokens = 0
        self._steps_put = 0
        self._steps_added = 0
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="attention-metrics", daemon=True)
        self._thread.start()

    def put(self, rows: AttentionRows) -> None:
        """Add the rows of a step, later; returns at once."""
        with self._changed:
            if self._pending and self._pending_bytes + rows.stats.nbytes > MOST_PENDING_BYTES:
                self._refused_tokens += len(rows.positions)
                return
            self._pending.append(rows)
            self._pending_bytes += rows.stats.nbytes
            self._steps_put += 1
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread after what is pending."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def flush(self, seconds: float) -> None:
        """Wait until everything that was put before this call is added, or until the time is over."""
        with self._changed:
            put = self._steps_put
            self._changed.wait_for(lambda: self._steps_added >= put, seconds)

    def snapshot(self) -> HeadSnapshot:
        """Everything that has been added."""
        with self._changed:
            refused = self._refused_tokens
        with self._sums_lock:
            recent = list(self._recent)
            return HeadSnapshot(
                self._counts.copy(),
                self._entropy.copy(),
                self._context_sums.copy(),
                self._context_counts.copy(),
                sum(recent[1:], recent[0]).summary() if recent else None,
                self._dispersion.smoothed(),
                self._dispersion.dispersed(),
                self._dispersion.crossing(),
                None if self._drift is None else self._drift.index(),
                self._share_unsharpened(),
                refused + self._not_finite_tokens,
            )

    def _share_unsharpened(self) -> NDArray[np.float64] | None:
        tokens = sum(count for _, count in self._unsharpened)
        if not tokens:
            return None
        rows = np.sum([beyond for beyond, _ in self._unsharpened], axis=0) / tokens
        return np.where(np.isnan(self._reach), np.nan, rows)

    def _run(self) -> None:
        while rows := self._next():
            try:
                self._add(rows)
            except Exception:
                logger.exception("attention statistics of a step could not be added up")
            with self._changed:
                self._steps_added += 1
                self._changed.notify_all()

    def _next(self) -> AttentionRows | None:
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._closed)
            if not self._pending:
                return None
            rows = self._pending.popleft()
            self._pending_bytes -= rows.stats.nbytes
            return rows

    def _add(self, rows: AttentionRows) -> None:
        finite = np.asarray(np.isfinite(rows.stats).all(axis=(0, 2, 3)))  # a NaN would stay in the sums for ever
        if not finite.all():
            rows = rows.of(finite)
        layers, heads, buckets = self._counts.shape
        entropy = rows.stats[..., ENTROPY]  # [layers, tokens, heads]
        bucket = np.searchsorted(self.bounds, entropy, side="left")  # le: a value on the bound is inside
        series = np.arange(layers)[:, None, None] * heads + np.arange(heads)
        counts = np.bincount((series * buckets + bucket).ravel(), minlength=self._counts.size)
        totals = add_up(rows)
        context_sums, context_tokens = self._by_context(rows)
        with self._sums_lock:
            self._not_finite_tokens += int((~finite).sum())
            self._counts += counts.reshape(self._counts.shape)
            self._entropy += totals.sums[0]
            self._recent.append(totals)
            # A sharpened row has less entropy than before, so what lies beyond now did so then.
            self._unsharpened.append(((entropy > self._reach[:, None]).sum(1), entropy.shape[1]))
            self._context_sums += context_sums.sum(1)
            self._context_counts += context_tokens * heads
            self._dispersion.add(context_sums, context_tokens)
            if self._drift is not None:
                self._drift.add(rows)

    def _by_context(self, rows: AttentionRows) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Sums of H / ln n [layers, heads, ranges] by context length, and how many tokens [ranges] they are over."""
        past_first = rows.positions > 0  # ln 1 = 0: the first token has no normalized entropy
        values = normalized(rows)[:, past_first]  # [layers, tokens, heads]
        which = np.searchsorted(self.contexts, rows.positions[past_first] + 1, side="left")
        member = which[:, None] == np.arange(len(self.contexts))  # [tokens, ranges]
        sums = np.einsum("lth,tr->lhr", values, member.astype(np.float64), optimize=True)
        return sums, member.sum(0)
