"""Entmax: weights from a threshold tau, and the search for the tau at which they sum to 1.

Logits come without their `factor`, as in `normalizers.py`. tau is relative to the keys' largest s = (alpha - 1) z: it
lies between -1 and 0, or, if the sink's s is larger, between the sink's s - 1 and the sink's s.
"""

import triton
import triton.language as tl

from sharp.plugins.triton.arithmetic import finite_or_zero, log2, reciprocal


@triton.jit
def entmax_excess(logits, peak, threshold, rate):
    """Return x = [s - tau]_+ with s = (alpha - 1)(z - max z), `rate` times the difference of the logits; NaN stays NaN.

    Logits are [rows, keys]; `peak`, the largest logit, and `threshold`, tau, are [rows]. `rate` is alpha - 1 times the
    logits' factor.

    The difference is taken first. A fused form as in `entmax_aim` would not always leave the largest logit above tau,
    because near 1e7 float32 has steps of 1.
    """
    excess = (logits - peak[:, None]) * rate - threshold[:, None]
    return tl.maximum(excess, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def entmax_power(excess, alpha, OPTIONS: tl.constexpr):
    """Return x^(1 / (alpha - 1)) of x >= 0, entmax's weight before division (Peters et al. 2019, Eq. 4).

    With `OPTIONS.power` "one" (alpha 2) or "two" (alpha 1.5), `alpha` is not read.
    """
    if OPTIONS.power == "one":
        return excess
    if OPTIONS.power == "two":
        return excess * excess
    return tl.exp2(log2(excess) / (alpha - 1.0))


@triton.jit
def entmax_sums(excess, alpha, OPTIONS: tl.constexpr):
    """Return F = sum x^k, G = sum x^(k - 1) and the number of x > 0 over the keys, [rows] each; k = 1 / (alpha - 1).

    `excess` is x, [rows, keys]. The number is counted for k = 2 only, and otherwise 0.
    """
    weights = entmax_power(excess, alpha, OPTIONS)
    support = 0.0
    if OPTIONS.power == "one":
        slopes = (excess != 0).to(tl.float32)
    elif OPTIONS.power == "two":
        slopes = excess
        # The minimum with 1 of the bits is 1 if excess is not 0; the comparison would take more instructions.
        support = tl.sum(tl.minimum(excess.to(tl.int32, bitcast=True), 1), 1).to(tl.float32)
    else:
        slopes = tl.where(excess == 0, 0.0, weights / excess)
    return tl.sum(weights, 1), tl.sum(slopes, 1), support


@triton.jit
def entmax_tail(distance, sums, alpha, OPTIONS: tl.constexpr):
    """Return reach, q and 1 / q of the power law F (D / reach)^q for F, D being the distance from the end of the tail.

    `distance` is that of tau from the largest s; `sums` are those of `entmax_sums` at tau.

    The law is exact for equal logits and close for any smooth tail, including the keys that a step will add or drop.
    For k = 2 the end of the tail follows from F' = -2 G and F'' = 2 support; for other k it is the largest logit.
    """
    total, slope, support = sums
    ratio = total * reciprocal(slope)
    if OPTIONS.power == "two":
        # F support >= G^2, except for estimates. A few large weights beside many small ones have no such tail, so
        # the flatness is limited to 0.05 (q = 20).
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
    """Return the distance from tau to the right where the power law of `entmax_tail` has F = 1; below 0 where F < 1.

    tau lies `distance` below the largest s; `sums` are those of `entmax_sums` at tau.
    """
    reach, _, flatness = entmax_tail(distance, sums, alpha, OPTIONS)
    return reach - reach * tl.exp2(-log2(sums[0]) * flatness)


@triton.jit
def entmax_aim(logits, factor, state, alpha, OPTIONS: tl.constexpr):
    """Update the running maximum, a tau close to the root for the keys so far, and the sums of that tau.

    A tile's own sums are exact for the tau at which the tile arrives. The earlier sums are assumed to follow
    `entmax_tail` when tau moves to F = 1 and when a higher maximum pulls tau up. So the sums are estimates, which are
    good only for where the search starts. `logits` are a tile's [rows, keys], without their `factor`.

    Return the state (peak, -tau, F, G, support), [rows] each, which has the form of `state`; F is 0 before the first
    key. Also return whether the tile's keys may get a weight, bool [rows]: tau is at least -1, so keys 1 below the peak
    so far get none.
    """
    peak, distance, total, slope, support = state
    largest = tl.max(logits, 1)
    moved = tl.maximum(peak, largest)
    # `where` is used instead of `max`, because differences are NaN before the first finite logit.
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
    dead = ((largest - moved) * rate <= -1.0) & (add_total == 0)  # false if a logit is NaN
    return (moved, distance, total, slope, support), ~dead


@triton.jit
def entmax_joined(peak, parts, rate, alpha, OPTIONS: tl.constexpr):
    """Return a tau close to the root for all keys of rows [rows], whose largest logit is `peak`, from those of parts.

    `parts` are the results of `entmax_aim` for each part, (peaks, -taus, F, G, supports), [parts, rows] each; the sums
    are assumed to follow their tails. `rate` is alpha - 1 times the logits' factor.

    The root is at least the largest tau of any part, because all sums grow with more keys.
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
    """Return the s of a row's sink, relative to the largest s of the row's keys like tau; -infinity for no sink.

    `sink` is the sink's logit, and `peak` the keys' largest logit times the logits' factor.

    If it is 1 or more, no key has a weight. It is limited to 2, which keeps tau exact.
    """
    s = tl.minimum((sink - peak) * (alpha - 1.0), 2.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(sink == -float("inf"), sink, s)


@triton.jit
def entmax_sink_sums(threshold, of_sink, alpha, OPTIONS: tl.constexpr):
    """Return what the sink, whose s is `of_sink`, adds to the sums of a row's threshold (`entmax_sums`)."""
    excess = tl.maximum(of_sink - threshold, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return entmax_sums(excess[:, None], alpha, OPTIONS)


@triton.jit
def entmax_bracket(visible, of_sink, alpha):
    """Return bounds of tau, those of a row with one weight and with equal weights, and the largest s, key or sink.

    The first two are widened by 1e-5, so that tau lies inside; tau is always less than the third. `visible` is the
    number of visible keys, `of_sink` the sink's s (`entmax_sink`).
    """
    top = tl.maximum(of_sink, 0.0)
    competing = tl.maximum(visible + (of_sink > -float("inf")).to(tl.float32), 1.0)
    return top - (1.0 + 1e-5), top + (1e-5 - 1.0) * tl.exp2(tl.log2(competing) * (1.0 - alpha)), top


@triton.jit
def entmax_step(threshold, low, high, top, sums, alpha, OPTIONS: tl.constexpr):
    """Take one step of the search for F(tau) = 1; return the next tau and the bracket [low, high] around the root.

    `sums` are F, G and support at `threshold`, the tau so far, with the sink's share. The first bracket and `top` are
    those of `entmax_bracket`.

    The step mostly goes to the root of `entmax_tail`. For k = 1 and F > 1 it is the Newton step, which is exact once
    the support is right. For other k except 2, far to the left of the root, it is Newton's on F^(1/k) - 1, which climbs
    without passing the root. For k < 1, where F is concave between the keys, it is Newton's on F - 1. A step that
    leaves the bracket becomes a bisection.
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
    # An end of the bracket counts as outside, because steps from end to end would never stop.
    inside = (following > low) & (following < high) | (following == threshold)
    return tl.where(inside, following, low + (high - low) * 0.5), low, high


@triton.jit
def entmax_unsettled(following, threshold, total, estimate, alpha, OPTIONS: tl.constexpr):
    """Return whether a row needs another step, bool [rows].

    `following` is the result of a step from `threshold`, whose F is `total`.

    A step at least squares the error, and the division by the sum of weights removes the rest. From the right a step
    may pass the root by what many keys just below tau add, so the tolerance there is smaller. The result of an
    `estimate` is checked again (`entmax_missed`). A step from an error of 0.35 mostly passes that check, a step from a
    larger error seldom.
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
    """Return whether an estimated tau is too far off; `total` is its F with the sink's share.

    F - 1 is the error of all weights; bfloat16 has steps of 2^-7. The result for NaN is false.
    """
    return (total > 1.0 + 2.0**-7) | (total < 1.0 - 2.0**-7)
