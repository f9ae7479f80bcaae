"""`HeadStatistics`: adds up the attention statistics of every layer and head of a model, beside the engine."""

import logging
import threading
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sharp.core.manifest import ExpectedEntropy, Manifest
from sharp.plugins.op.temperature_range import largest_sharpened
from sharp.serving.api.attention import ENTROPY, AttentionRows, AttentionSummary, AttentionTotals, add_up, normalized
from sharp.serving.config import MIB, MetricsConfig
from sharp.serving.observability.metrics.baseline import Drift, read_baseline
from sharp.serving.observability.metrics.dispersion import LEAST_WEIGHT, Dispersion, context_bounds

logger = logging.getLogger(__name__)

MOST_PENDING_BYTES = 16 * MIB
# Nothing is expected if a smaller share of the server's tokens is in ranges of contexts that the export measured.
LEAST_SHARE = 0.5


def entropy_buckets(max_context: int) -> NDArray[np.float64]:
    """Return bucket bounds in nats up to ln(max_context), which no entropy exceeds; finer for sharp heads."""
    fine = [0.1, 0.25, 0.5, 1, 1.5, 2, 2.5, 3]
    highest = float(np.ceil(np.log(max_context)))
    return np.array([*(bound for bound in fine if bound < highest), *np.arange(min(4, highest), highest + 1)])


@dataclass(frozen=True)
class HeadSnapshot:
    """The sums and means collected so far.

    Attributes:
        counts: int64 [layers, heads, buckets], numbers of tokens by entropy; the last bucket is above all bounds.
        entropy: float64 [layers, heads], the sum of the entropies of the tokens in `counts`.
        context_sums: float64 [layers, ranges], the sum of H / ln n over tokens and heads, by context length.
        context_counts: int64 [ranges], the number of values in each sum of `context_sums`.
        recent: means over the last collected steps; None before the first step.
        smoothed: float64 [layers, heads], the result of `Dispersion.smoothed`.
        dispersed: bool [layers, heads], the result of `Dispersion.dispersed`.
        crossing: float64 [layers, heads], the result of `Dispersion.crossing`.
        expected: float64 [layers, heads], the result of `ExpectedMeans.mean`; None if the manifest has no measurement.
        drift: float64 [layers, heads], the result of `Drift.index`; None without a baseline.
        unsharpened: float64 [layers, heads], the share of recent rows beyond the reach of the head's adaptive
            temperature; NaN for heads without one; None before the first step.
        left_out_tokens: the number of tokens that none of these numbers includes.
    """

    counts: NDArray[np.int64]
    entropy: NDArray[np.float64]
    context_sums: NDArray[np.float64]
    context_counts: NDArray[np.int64]
    recent: AttentionSummary | None
    smoothed: NDArray[np.float64]
    dispersed: NDArray[np.bool_]
    crossing: NDArray[np.float64]
    expected: NDArray[np.float64] | None
    drift: NDArray[np.float64] | None
    unsharpened: NDArray[np.float64] | None
    left_out_tokens: int


def reach_of_heads(manifest: Manifest) -> NDArray[np.float64]:
    """Return the entropy [layers, heads] beyond which a head's adaptive temperature has no effect; NaN without one."""
    reach = np.full((manifest.layers, manifest.q_heads), np.nan)
    if manifest.norm.normalizer == "adaptive_softmax":
        reach[:] = largest_sharpened(manifest.norm.temperature_coefficients)
    for norm in manifest.norm.heads:
        adaptive = norm.normalizer == "adaptive_softmax"
        reach[norm.layer, list(norm.heads)] = largest_sharpened(norm.temperature_coefficients) if adaptive else np.nan
    return reach


class ExpectedMeans:
    """The means of H / ln n in a manifest, weighted by the server's tokens in each range of contexts."""

    def __init__(self, expected: ExpectedEntropy, bounds: NDArray[np.int64]) -> None:
        """Match `bounds` [ranges], the upper bounds of the server's ranges, with the export's ranges.

        The first range, of short contexts, never counts.
        """
        known = [(index, bound) for index, bound in enumerate(bounds.tolist()) if bound in expected.contexts]
        self._live = np.array([index for index, _ in known], np.int64)
        table = np.array(expected.normalized_entropy)  # [layers, heads, ranges of the export]
        self._means = table[..., [expected.contexts.index(bound) for _, bound in known]]

    def mean(self, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the means [layers, heads] for tokens `weights` [ranges]; NaN if too few are in measured ranges."""
        known = weights[self._live]
        if known.sum() < max(LEAST_WEIGHT, LEAST_SHARE * weights[1:].sum()):
            return np.full(self._means.shape[:2], np.nan)
        mean: NDArray[np.float64] = self._means @ known / known.sum()
        return mean


class HeadStatistics:
    """A thread that adds up attention statistics.

    The engine never waits for this thread. Pending rows may fill MOST_PENDING_BYTES; further steps are then left out,
    and their tokens counted. The metrics only sample every n-th step anyway, and adding up a step in the engine's
    thread would delay requests as much as waiting for this thread.
    """

    def __init__(self, manifest: Manifest, config: MetricsConfig) -> None:
        """Start the thread.

        Raises:
            NotFoundError: there is no file `attention_baseline`.
            InputError: the file `attention_baseline` is of another kind, or of another model.
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
        found = manifest.expected_entropy
        self._expected = None if found is None else ExpectedMeans(found, self.contexts)
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
        """Queue the rows of a step to be added, and return at once. If too much waits, the rows are left out."""
        with self._changed:
            if self._pending and self._pending_bytes + rows.stats.nbytes > MOST_PENDING_BYTES:
                self._refused_tokens += len(rows.positions)
                return
            self._pending.append(rows)
            self._pending_bytes += rows.stats.nbytes
            self._steps_put += 1
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread, and wait until it has added all pending rows."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def flush(self, seconds: float) -> None:
        """Wait until all rows put before this call are added, but at most `seconds`."""
        with self._changed:
            put = self._steps_put
            self._changed.wait_for(lambda: self._steps_added >= put, seconds)

    def snapshot(self) -> HeadSnapshot:
        """Return a snapshot of everything that was added so far."""
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
                None if self._expected is None else self._expected.mean(self._dispersion.weights),
                None if self._drift is None else self._drift.index(),
                self._share_unsharpened(),
                refused + self._not_finite_tokens,
            )

    def _share_unsharpened(self) -> NDArray[np.float64] | None:
        """Return the share [layers, heads] of recent tokens with entropy above the head's reach, or None."""
        tokens = sum(count for _, count in self._unsharpened)
        if not tokens:
            return None
        rows = np.sum([beyond for beyond, _ in self._unsharpened], axis=0) / tokens
        return np.where(np.isnan(self._reach), np.nan, rows)

    def _run(self) -> None:
        """Add up queued rows until the object is closed; the function of its thread."""
        while rows := self._next():
            try:
                self._add(rows)
            except Exception:
                logger.exception("attention statistics of a step could not be added up")
            with self._changed:
                self._steps_added += 1
                self._changed.notify_all()

    def _next(self) -> AttentionRows | None:
        """Wait for queued rows and return them; None once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._closed)
            if not self._pending:
                return None
            rows = self._pending.popleft()
            self._pending_bytes -= rows.stats.nbytes
            return rows

    def _add(self, rows: AttentionRows) -> None:
        """Add the statistics of a step's tokens to the sums; tokens that are NaN or infinite are only counted."""
        finite = np.asarray(np.isfinite(rows.stats).all(axis=(0, 2, 3)))  # a NaN would stay in the sums forever
        if not finite.all():
            rows = rows.of(finite)
        layers, heads, buckets = self._counts.shape
        entropy = rows.stats[..., ENTROPY]  # [layers, tokens, heads]
        # a value equal to the bound belongs to the bucket ("le")
        bucket = np.searchsorted(self.bounds, entropy, side="left")
        series = np.arange(layers)[:, None, None] * heads + np.arange(heads)
        counts = np.bincount((series * buckets + bucket).ravel(), minlength=self._counts.size)
        totals = add_up(rows)
        context_sums, context_tokens = self._by_context(rows)
        with self._sums_lock:
            self._not_finite_tokens += int((~finite).sum())
            self._counts += counts.reshape(self._counts.shape)
            self._entropy += totals.sums[0]
            self._recent.append(totals)
            # `entropy` is measured after sharpening, which only lowers it. A row whose entropy is beyond the reach now
            # was beyond it before, too.
            self._unsharpened.append(((entropy > self._reach[:, None]).sum(1), entropy.shape[1]))
            self._context_sums += context_sums.sum(1)
            self._context_counts += context_tokens * heads
            self._dispersion.add(context_sums, context_tokens)
            if self._drift is not None:
                self._drift.add(rows)

    def _by_context(self, rows: AttentionRows) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return sums of H / ln n [layers, heads, ranges] by context length, and the numbers of tokens [ranges]."""
        past_first = rows.positions > 0  # the first token has no normalized entropy, because ln 1 = 0
        values = normalized(rows)[:, past_first]  # [layers, tokens, heads]
        which = np.searchsorted(self.contexts, rows.positions[past_first] + 1, side="left")
        member = which[:, None] == np.arange(len(self.contexts))  # [tokens, ranges]
        sums = np.einsum("lth,tr->lhr", values, member.astype(np.float64), optimize=True)
        return sums, member.sum(0)
