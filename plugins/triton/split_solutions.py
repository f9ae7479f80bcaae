"""The solutions of the rows of a split prompt, which every program of a tile computes from the numbers of all parts.

`split_prefill.py` documents the layout of these numbers.
"""

import triton
import triton.language as tl

from sharp.plugins.triton.entmax import entmax_joined, entmax_sink, entmax_sink_sums, entmax_step, entmax_unsettled
from sharp.plugins.triton.normalizers import sink_weight, temperature
from sharp.plugins.triton.solve import merged_sums


@triton.jit
def sums_of_rows(sums, rows, exists, parts, MOST_PARTS: tl.constexpr):
    """Return pointers [parts, rows] to the first of each part's numbers, and whether the part and the row exist."""
    part = tl.arange(0, MOST_PARTS)[:, None]
    return sums + (rows[None, :] * parts + part) * 8, (part < parts) & exists[None, :]


@triton.jit
def adaptive_solution(
    observed, rows, exists, parts, sink, factor, polynomial, MOST_PARTS: tl.constexpr, OPTIONS: tl.constexpr
):
    """Return the rows' peaks, inverse temperatures and weights of sinks, from what all parts have observed.

    The results are [rows]. `observed` points to the sums of launch 0, [rows, parts, 8]; `sink` are logits, `factor` is
    the `logit_factor`, and `polynomial` (entropy threshold, t0, ..., t7). Peaks are without their factor.
    """
    place, used = sums_of_rows(observed, rows, exists, parts, MOST_PARTS)
    peaks = tl.load(place, mask=used, other=-float("inf"))
    totals = tl.load(place + 1, mask=used, other=0.0)
    weighted_logs = tl.load(place + 2, mask=used, other=0.0)
    peak = tl.max(peaks, 0)
    total, weighted_log = merged_sums(peaks * factor, (peak * factor)[None, :], totals, weighted_logs)
    threshold, t0, t1, t2, t3, t4, t5, t6, t7 = polynomial
    beta = temperature(total, weighted_log, threshold, t0, t1, t2, t3, t4, t5, t6, t7)
    return peak, beta, sink_weight(sink, peak * factor * beta, beta, beta, OPTIONS)


@triton.jit
def entmax_observed(observed, rows, exists, parts, rate, alpha, MOST_PARTS: tl.constexpr, OPTIONS: tl.constexpr):
    """Return the rows' peaks, numbers of visible keys, and estimated thresholds, from what all parts have observed.

    `observed` points to the sums of launch 0, [rows, parts, 8]; `rate` is alpha - 1 times the `logit_factor`. The
    results are [rows].
    """
    place, used = sums_of_rows(observed, rows, exists, parts, MOST_PARTS)
    peaks = tl.load(place, mask=used, other=-float("inf"))
    totals = tl.load(place + 1, mask=used, other=0.0)
    slopes = tl.load(place + 2, mask=used, other=0.0)
    distances = tl.load(place + 3, mask=used, other=0.0)
    visible = tl.sum(tl.load(place + 5, mask=used, other=0.0), 0)
    supports = tl.load(place + 6, mask=used, other=0.0)
    peak = tl.max(peaks, 0)
    return peak, visible, entmax_joined(peak, (peaks, distances, totals, slopes, supports), rate, alpha, OPTIONS)


@triton.jit
def entmax_counted(counted, rows, exists, parts, MOST_PARTS: tl.constexpr):
    """Return a threshold's sums over the keys of all parts: F, G and support (`entmax_sums`), [rows] each.

    `counted` points to the sums of the launch that counted, [rows, parts, 8].
    """
    place, used = sums_of_rows(counted, rows, exists, parts, MOST_PARTS)
    total = tl.sum(tl.load(place + 1, mask=used, other=0.0), 0)
    slope = tl.sum(tl.load(place + 2, mask=used, other=0.0), 0)
    return total, slope, tl.sum(tl.load(place + 6, mask=used, other=0.0), 0)


@triton.jit
def entmax_next(tau, low, high, top, sums, sink_s, sees, alpha, OPTIONS: tl.constexpr):
    """Return the next threshold and bracket of all rows from the keys' sums, and whether some row has not settled.

    The results are tau, low, high, [rows] each, and one bool. `sums` are those of `entmax_counted` without the sink,
    whose s is `sink_s`; rows that see no key (`sees`) count as settled.

    No threshold is an estimate here, because the sums of the weights are known only after the last launch.
    """
    total, slope, support = entmax_sink_sums(tau, sink_s, alpha, OPTIONS)
    sums = (total + sums[0], slope + sums[1], support + sums[2])
    following, low, high = entmax_step(tau, low, high, top, sums, alpha, OPTIONS)
    unsettled = entmax_unsettled(following, tau, sums[0], False, alpha, OPTIONS) & sees
    return following, low, high, tl.max(unsettled.to(tl.int32)) > 0


@triton.jit
def entmax_solution(
    observed,
    counted,
    rows,
    exists,
    parts,
    sink,
    factor,
    alpha,
    MOST_PARTS: tl.constexpr,
    OPTIONS: tl.constexpr,
):
    """Return the rows' peaks, thresholds and weights of sinks, [rows] each, from the observed and counted numbers.

    `observed` and `counted` point to the sums of launch 0 and of the last launch that counted, [rows, parts, 8]. `sink`
    are logits, `factor` is the `logit_factor`.
    """
    place, used = sums_of_rows(observed, rows, exists, parts, MOST_PARTS)
    peak = tl.max(tl.load(place, mask=used, other=-float("inf")), 0)
    tau = tl.load(counted + rows * parts * 8 + 3, mask=exists, other=0.0)
    return peak, tau, entmax_sink_sums(tau, entmax_sink(sink, peak * factor, alpha), alpha, OPTIONS)[0]
