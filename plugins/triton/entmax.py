"""Entmax: weights from a threshold tau, and the search for the tau at which they sum to 1.

Logits are what they are a `factor` of, as in `normalizers.py`. tau counts from the largest s = (alpha - 1) z: it lies
between -1 and 0, or where the sink's s is larger between that less 1 and that.
"""

import triton
import triton.language as tl

from sharp.plugins.triton.arithmetic import finite_or_zero, log2, reciprocal


@triton.jit
def entmax_excess(logits, peak, threshold, rate):
    """The x = [s - tau]_+ with s = (alpha - 1)(z - max z), `rate` times the logits' difference; a NaN stays.

    In one instruction, as in `entmax_aim`, the largest logit would not always be above tau: of 1e7, steps are of 1.
    """
    excess = (logits - peak[:, None]) * rate - threshold[:, None]
    return tl.maximum(excess, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def entmax_power(excess, alpha, OPTIONS: tl.constexpr):
    """x^(1 / (alpha - 1)), entmax's weight (Peters et al. 2019, Eq. 4)."""
    if OPTIONS.power == "one":
        return excess
    if OPTIONS.power == "two":
        return excess * excess
    return tl.exp2(log2(excess) / (alpha - 1.0))


@triton.jit
def entmax_sums(excess, alpha, OPTIONS: tl.constexpr):
    """F = sum x^k and G = sum x^(k - 1) over the keys, k = 1 / (alpha - 1), and for k = 2 how many x are not 0."""
    weights = entmax_power(excess, alpha, OPTIONS)
    support = 0.0
    if OPTIONS.power == "one":
        slopes = (excess != 0).to(tl.float32)
    elif OPTIONS.power == "two":
        slopes = excess
        # As excess != 0, which takes more instructions.
        support = tl.sum(tl.minimum(excess.to(tl.int32, bitcast=True), 1), 1).to(tl.float32)
    else:
        slopes = tl.where(excess == 0, 0.0, weights / excess)
    return tl.sum(weights, 1), tl.sum(slopes, 1), support


@triton.jit
def entmax_tail(distance, sums, alpha, OPTIONS: tl.constexpr):
    """F around a threshold as the power law F (D / reach)^q in the distance D from the tail's end: reach, q and 1 / q.

    Such a law is exact for equal logits and near for any smooth tail, with the keys that a step will add or drop. For
    k = 2 the end follows from F' = -2 G and F'' = 2 support, for other k the end is the largest logit.
    """
    total, slope, support = sums
    ratio = total * reciprocal(slope)
    if OPTIONS.power == "two":
        # F support >= G^2 but for estimates. A few large weights beside many small ones have no such tail: q is 20.
        flatness = tl.maximum(1.0 - tl.maximum(0.5 * support * ratio * reciprocal(slope), 0.5), 0.05)
        order = reciprocal(flatness)
        reach = 0.5 * ratio * order
    else:
        reach = distance
        flatness = ratio * reciprocal(distance) * (alpha - 1.0)
        order = reciprocal(flatness)
    return reach, order, flatness


@triton.jit
def entmax_near(distance, sums, alpha, OPTIONS: tl.constexpr):
    """How far to the right of tau, -`distance`, its `entmax_tail` has F = 1."""
    reach, _, flatness = entmax_tail(distance, sums, alpha, OPTIONS)
    return reach - reach * tl.exp2(-log2(sums[0]) * flatness)


@triton.jit
def entmax_aim(logits, factor, state, alpha, OPTIONS: tl.constexpr):
    """What one pass finds: the running maximum, and a tau close to the root for the keys so far with its sums.

    A tile's own sums are those of tau when the tile comes. What was summed before is taken to follow `entmax_tail`,
    where tau moves to its F = 1 and where a higher maximum pulls tau up. So the sums are estimates: good for where the
    search starts, and for nothing else. State and result are (peak, -tau, F, G, support); F is 0 before the first key.
    Also whether the tile's keys may get a weight: tau is above -1, and so are theirs from the peak so far.
    """
    peak, distance, total, slope, support = state
    largest = tl.max(logits, 1)
    moved = tl.maximum(peak, largest)
    # `where` and not `max`: before the first finite logit, differences are NaN.
    reach, order, flatness = entmax_tail(distance, (total, slope, support), alpha, OPTIONS)
    left = tl.where(total > 1, tl.exp2(-log2(total) * flatness), 1.0)
    rate = factor * (alpha - 1.0)
    lifted = (moved - peak) * rate + distance - tl.where(total > 1, reach * (1.0 - left), 0.0)
    distance = tl.where(lifted < 1, lifted, 1.0)
    left -= (lifted - distance) * reciprocal(reach)
    remains = left > 0
    log = log2(left)
    excess = logits * rate - (finite_or_zero(moved) * rate - distance)[:, None]
    excess = tl.maximum(excess, 0.0, propagate_nan=tl.PropagateNan.ALL)
    add_total, add_slope, add_support = entmax_sums(excess, alpha, OPTIONS)
    total = tl.where(remains, total * tl.exp2(log * order), 0.0) + add_total
    slope = tl.where(remains, slope * tl.exp2(log * (order - 1.0)), 0.0) + add_slope
    if OPTIONS.power == "two":
        support = tl.where(remains, support * tl.exp2(log * (order - 2.0)), 0.0) + add_support
    dead = ((largest - moved) * rate <= -1.0) & (add_total == 0)  # not where a logit is NaN
    return (moved, distance, total, slope, support), ~dead


@triton.jit
def entmax_joined(peak, parts, rate, alpha, OPTIONS: tl.constexpr):
    """A tau close to the root for all keys of rows [rows], whose largest logit is `peak`, from those of their parts.

    `parts` are what `entmax_aim` has found for each, [parts, rows], and the sums are taken to follow their tails from
    there, too. The root is right of every part's own, as all sums grow with more keys.
    """
    peaks, distances, totals, slopes, supports = parts
    own = tl.where(totals > 0, (peaks - peak[None, :]) * rate - distances, -float("inf"))
    tau = tl.max(own, 0)
    reach, order, _ = entmax_tail(distances, (totals, slopes, supports), alpha, OPTIONS)
    left = 1.0 - (tau[None, :] - own) * reciprocal(reach)
    remains = (left > 0) & (totals > 0)
    log = log2(left)
    total = tl.sum(tl.where(remains, totals * tl.exp2(log * order), 0.0), 0)
    slope = tl.sum(tl.where(remains, slopes * tl.exp2(log * (order - 1.0)), 0.0), 0)
    support = tl.sum(tl.where(remains, supports * tl.exp2(log * (order - 2.0)), 0.0), 0)
    return tau + tl.where(total > 1, entmax_near(-tau, (total, slope, support), alpha, OPTIONS), 0.0)


@triton.jit
def entmax_sink(sink, peak, alpha):
    """The s of a row's sink, counted as tau from the largest s of its keys; -infinity for none.

    From 1 on no key has a weight, so it need not be larger than 2, which keeps tau exact.
    """
    s = tl.minimum((sink - peak) * (alpha - 1.0), 2.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(sink == -float("inf"), sink, s)


@triton.jit
def entmax_sink_sums(threshold, of_sink, alpha, OPTIONS: tl.constexpr):
    """What the sink, whose s is `of_sink`, adds to the sums of a row's threshold (`entmax_sums`)."""
    excess = tl.maximum(of_sink - threshold, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return entmax_sums(excess[:, None], alpha, OPTIONS)


@triton.jit
def entmax_bracket(visible, of_sink, alpha):
    """What tau lies between: that of a row with one weight, and that of one with equal weights, which lie inside.

    Third what it is less than: the largest s, 0 or the sink's.
    """
    top = tl.maximum(of_sink, 0.0)
    competing = tl.maximum(visible + (of_sink > -float("inf")).to(tl.float32), 1.0)
    return top - (1.0 + 1e-5), top + (1e-5 - 1.0) * tl.exp2(tl.log2(competing) * (1.0 - alpha)), top


@triton.jit
def entmax_step(threshold, low, high, top, sums, alpha, OPTIONS: tl.constexpr):
    """One step of the search for tau with F(tau) = 1: the next tau and the bracket [low, high] around the root.

    Mostly to where `entmax_tail` has its root. For k = 1 and F > 1 the Newton step, which is exact once the support is
    right, and for other k but 2, far on the left of the root, that on F^(1/k) - 1, which climbs without passing it. For
    k < 1, where F is concave between the keys, the plain step on F - 1. Where a step leaves the bracket, a bisection.
    """
    total, slope, _ = sums
    low = tl.where(total >= 1, threshold, low)
    high = tl.where(total >= 1, high, threshold)
    following = threshold + entmax_near(top - threshold, sums, alpha, OPTIONS)
    if OPTIONS.power == "one":
        following = tl.where(total < 1, following, threshold + (total - 1.0) / slope)
    elif OPTIONS.power == "any":
        climbing = threshold + (1.0 - tl.exp2(tl.log2(total) * (1.0 - alpha))) * total / slope
        plain = threshold + (total - 1.0) * (alpha - 1.0) / slope
        following = tl.where(alpha > 2.0, plain, tl.where(total < 2, following, climbing))
    # An end of the bracket counts as outside: steps from end to end would go on for ever.
    inside = (following > low) & (following < high) | (following == threshold)
    return tl.where(inside, following, low + (high - low) * 0.5), low, high


@triton.jit
def entmax_unsettled(following, threshold, total, estimate, alpha, OPTIONS: tl.constexpr):
    """Whether a row needs one more step: each squares the error at least, and the division by the sum mends the rest.

    From the right a step may pass the root by what many keys just below tau add, so less is let through there. What
    comes of a `estimate` is looked at again (`entmax_missed`): one step from 0.35 passes that mostly, from more seldom.
    """
    above, below = total - 1.0, 1.0 - total
    if OPTIONS.dtype == "float32":
        most = 3e-4 if OPTIONS.power == "two" else (1e-5 if OPTIONS.power == "one" else 1e-6)
        far = (above > most) | (below > most)
    elif OPTIONS.power == "two":
        far = (above > tl.where(estimate, 0.35, 1e-2)) | (below > tl.where(estimate, 0.35, 1e-3))
    elif OPTIONS.power == "one":
        far = (above > 1e-3) | (below > 1e-4)
    else:
        most = tl.where(alpha > 2.0, 1e-6, 1e-3)
        far = (above > most) | (below > tl.minimum(most, 1e-4))
    return far & (following != threshold)


@triton.jit
def entmax_missed(total):
    """Whether an estimated tau is too far off: F - 1 is the error of all weights; bfloat16 has steps of 2^-7."""
    return (total > 1.0 + 2.0**-7) | (total < 1.0 - 2.0**-7)
