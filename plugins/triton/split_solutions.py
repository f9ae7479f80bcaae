"""What the rows of a split prompt are solved to: by every program of their tile, from the numbers of all parts.

Where these lie `split_prefill.py` says.
"""

import triton
import triton.language as tl

from sharp.plugins.triton.entmax import entmax_joined, entmax_sink, entmax_sink_sums, entmax_step, entmax_unsettled
from sharp.plugins.triton.normalizers import sink_weight, temperature
from sharp.plugins.triton.solve import merged_sums


@triton.jit
def sums_of_rows(sums, rows, exists, parts, MOST_PARTS: tl.constexpr):
    """Pointers [parts, rows] to the first of each part's numbers, and whether there are any."""
    part = tl.arange(0, MOST_PARTS)[:, None]
    return sums + (rows[None, :] * parts + part) * 8, (part < parts) & exists[None, :]


@triton.jit
def adaptive_solution(
    observed, rows, exists, parts, sink, factor, polynomial, MOST_PARTS: tl.constexpr, OPTIONS: tl.constexpr
):
    """The rows' peaks, inverse temperatures and weights of sinks, from what all parts have observed."""
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
    """The rows' peaks, how many keys they see, and about where their thresholds are, from what all parts have found."""
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
    """A threshold's sums over the keys of all parts."""
    place, used = sums_of_rows(counted, rows, exists, parts, MOST_PARTS)
    total = tl.sum(tl.load(place + 1, mask=used, other=0.0), 0)
    slope = tl.sum(tl.load(place + 2, mask=used, other=0.0), 0)
    return total, slope, tl.sum(tl.load(place + 6, mask=used, other=0.0), 0)


@triton.jit
def entmax_next(tau, low, high, top, sums, sink_s, sees, alpha, OPTIONS: tl.constexpr):
    """The next threshold and bracket of all rows from the keys' sums, and whether some row of the tile has not settled.

    None is an estimate: the weights' sums are known behind the last launch only.
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
    """The rows' peaks, thresholds and weights of sinks, from what has been found."""
    place, used = sums_of_rows(observed, rows, exists, parts, MOST_PARTS)
    peak = tl.max(tl.load(place, mask=used, other=-float("inf")), 0)
    tau = tl.load(counted + rows * parts * 8 + 3, mask=exists, other=0.0)
    return peak, tau, entmax_sink_sums(tau, entmax_sink(sink, peak * factor, alpha), alpha, OPTIONS)[0]
