"""The normalizers as a parameter of the loops: what a tile of logits adds to the running sums of its rows.

Logits come as what they are a `factor` of (`logit_factor`): a multiplication that is put off goes into a later
instruction. The state of a tile's rows is a tuple of
    peak          the running maximum of the logits, of ssa's exponents; 0 where weights have a fixed scale
    total         sum of w
    weighted_log  sum of w log2 w
    highest       largest logit
    lowest        smallest visible logit
    visible       number of visible keys; of decoding only
    support       number of keys with w > 0
    output        sum of w * value, [rows, value_width]
with w a weight before division. In decoding (`Options.spread`) there is a sum for every place of a tile, [rows, keys]
in the place of [rows]: sums over a row would wait for all warps. The peak is so too where a walk is ALONE with it, as
no values are weighed. `highest`, `lowest`, `support` and, but for the entropy, `weighted_log` are kept for
statistics only. A masked key has the logit -infinity, which every normalizer gives the weight 0.
"""

import triton
import triton.language as tl

LN_2 = tl.constexpr(0.6931471805599453)
SIGN = tl.constexpr(-(2**31))
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def empty_state(OPTIONS: tl.constexpr, ALONE: tl.constexpr):
    """The state of rows that have seen no key."""
    row = tl.full([OPTIONS.rows], 0, tl.float32)
    zeros = tl.full([OPTIONS.rows, OPTIONS.keys], 0, tl.float32) if OPTIONS.spread else row
    peak = (zeros if ALONE else row) - (0.0 if OPTIONS.pointwise else float("inf"))
    output = tl.full([OPTIONS.rows, OPTIONS.value_width], 0, tl.float32)
    return peak, zeros, zeros, zeros - float("inf"), zeros + float("inf"), zeros, zeros, output


@triton.jit
def summed(numbers, OPTIONS: tl.constexpr):
    """What numbers [rows, keys] add to a sum of the state."""
    return numbers if OPTIONS.spread else tl.sum(numbers, 1)


@triton.jit
def widened(numbers, WIDE: tl.constexpr):
    """Numbers [rows], as [rows, 1] where WIDE."""
    return numbers[:, None] if WIDE else numbers


@triton.jit
def added_up(state, factor, OPTIONS: tl.constexpr, ALONE: tl.constexpr):
    """The state with everything for whole rows."""
    if not OPTIONS.spread:
        return state
    peak, total, weighted_log, highest, lowest, visible, support, output = state
    if ALONE:
        largest = tl.max(peak, 1)
        moved = (peak - finite_or_zero(largest)[:, None]) * factor
        share = tl.exp2(moved)
        weighted_log = tl.where(share == 0, 0.0, share * (weighted_log + moved * total))
        total, peak = share * total, largest
    total, weighted_log = tl.sum(total, 1), tl.sum(weighted_log, 1)
    highest, lowest = tl.max(highest, 1), tl.min(lowest, 1)
    return peak, total, weighted_log, highest, lowest, tl.sum(visible, 1), tl.sum(support, 1), output


@triton.jit
def finite_or_zero(peak):
    """What may be subtracted: before the first finite logit the maximum is -inf, and -inf - -inf is NaN."""
    return tl.where(peak == -float("inf"), 0.0, peak)


@triton.jit
def log2(x):
    """To 2^-22 in one instruction, for whole tiles: `tl.log2` takes 25, and takes a subnormal number for 0."""
    if INTERPRETED:
        result = tl.log2(x)
    else:
        result = tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return result


@triton.jit
def log2_above_one(x):
    """As `log2` for x >= 1, which is never subnormal: without the three instructions that look for that."""
    if INTERPRETED:
        result = tl.log2(x)
    else:
        result = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return result


@triton.jit
def reciprocal(x):
    """1 / x in one instruction and to 2^-22; of a subnormal number infinity."""
    if INTERPRETED:
        result = 1.0 / x
    else:
        result = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return result


@triton.jit
def logit_factor(scale, OPTIONS: tl.constexpr):
    """What logits are multiplied by for the kernels' unit (`Options.unit`): positive, and 1 unless `scaled_late`."""
    return scale * OPTIONS.unit if OPTIONS.scaled_late else 1.0


@triton.jit
def sum_of_logs(weights, logs, OPTIONS: tl.constexpr):
    """Sum of w log2 w over the keys; 0 log 0 = 0, and where log2 w < -150, w is 0."""
    return summed(weights * tl.maximum(logs, -150.0), OPTIONS)


@triton.jit
def add_values(output, weights, values, OPTIONS: tl.constexpr):
    """Returns output [rows, value_width] + weights [rows, keys] @ values [keys, value_width]."""
    if OPTIONS.dtype == "float32":
        output = tl.dot(weights, values, output, input_precision=OPTIONS.precision)
    elif OPTIONS.wide_weights:
        output = tl.dot(weights, values.to(tl.float32), output, input_precision="tf32")
    else:
        output = tl.dot(weights.to(values.dtype), values, output)
    return output


@triton.jit
def ssa_exponents(logits, row, factor):
    """Base-2 exponents n sgn(z) log2(1 + b|z|) of ssa's weights (1 + b|z|)^(sgn(z) n) (SSA, Eq. 5)."""
    _, _, _, _, b, n = row
    size = n[:, None] * log2_above_one(1.0 + (b * factor)[:, None] * tl.abs(logits))
    sign = logits.to(tl.int32, bitcast=True) & SIGN  # one instruction with the next, where `where` takes two
    return (size.to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)


@triton.jit
def pointwise_weights(logits, OPTIONS: tl.constexpr):
    """sigmoid, relu, relu2; `z <= 0` and not `max`, which drops a NaN."""
    if OPTIONS.normalizer == "sigmoid":
        small = tl.exp(-tl.abs(logits))
        return tl.where(logits < 0, small, 1.0) / (1.0 + small)
    positive = tl.where(logits <= 0, 0.0, logits)
    if OPTIONS.normalizer == "relu2":
        return positive * positive
    return positive


@triton.jit
def stream(
    logits,
    row,
    factor,
    state,
    OPTIONS: tl.constexpr,
    STATISTICS: tl.constexpr,
    SHIFTED: tl.constexpr,
    ALONE: tl.constexpr,
):
    """Weights of a tile from one pass over the logits, and the state (peak, total, weighted_log, support, factor).

    Exponential: online softmax, and the entropy's sum beside it (ICML 2025, App. G): when the peak moves by
    d = old - new, weighted_log becomes 2^d (weighted_log + d total). The last result, 2^d, is for the output so far.
    Without SHIFTED the weights are 2^exponent as they are, and there are no statistics: `within_range` says afterwards
    whether that went well.
    """
    peak, total, weighted_log, support = state
    if OPTIONS.pointwise:
        weights = pointwise_weights(logits * factor, OPTIONS)
        shrunk = 1.0
        total += summed(weights, OPTIONS)
        if STATISTICS:
            weighted_log += sum_of_logs(weights, log2(weights), OPTIONS)
            support += summed((weights != 0).to(tl.float32), OPTIONS)
    elif not SHIFTED:
        weights = tl.exp2(ssa_exponents(logits, row, factor))
        shrunk = 1.0
        total += summed(weights, OPTIONS)
    else:
        if OPTIONS.normalizer == "ssa":
            logits = ssa_exponents(logits, row, factor)
            factor = 1.0
        moved = tl.maximum(peak, logits if ALONE else tl.max(logits, 1))
        shift = finite_or_zero(moved)
        shifted = logits * factor - widened(shift * factor, not ALONE)
        weights = tl.exp2(shifted)
        WIDE: tl.constexpr = OPTIONS.spread and not ALONE
        distance = widened((peak - shift) * factor, WIDE)
        shrunk = tl.exp2(distance)
        if STATISTICS:
            before = shrunk * (weighted_log + distance * total)
            before = tl.where(widened(peak, WIDE) == -float("inf"), 0.0, before)
            weighted_log = before + sum_of_logs(weights, shifted, OPTIONS)
        total = total * shrunk + summed(weights, OPTIONS)
        peak = moved
    return weights, (peak, total, weighted_log, support), shrunk


@triton.jit
def within_range(total, output):
    """Rows whose weights, not shifted, stayed within float32's range and far from its ends, with a finite output."""
    return (total > 2.0**-30) & (total < 2.0**60) & (tl.sum(output * 0.0, 1) == 0)


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
def entmax_bracket(visible, alpha):
    """What tau lies between: that of a row with one weight, and that of one with equal weights, which lie inside."""
    low = visible * 0.0 - (1.0 + 1e-5)
    return low, (1e-5 - 1.0) * tl.exp2(tl.log2(tl.maximum(visible, 1.0)) * (1.0 - alpha))


@triton.jit
def entmax_step(threshold, low, high, sums, alpha, OPTIONS: tl.constexpr):
    """One step of the search for tau with F(tau) = 1: the next tau and the bracket [low, high] around the root.

    Mostly to where `entmax_tail` has its root. For k = 1 and F > 1 the Newton step, which is exact once the support is
    right, and for other k but 2, far on the left of the root, that on F^(1/k) - 1, which climbs without passing it. For
    k < 1, where F is concave between the keys, the plain step on F - 1. Where a step leaves the bracket, a bisection.
    """
    total, slope, _ = sums
    low = tl.where(total >= 1, threshold, low)
    high = tl.where(total >= 1, high, threshold)
    following = threshold + entmax_near(-threshold, sums, alpha, OPTIONS)
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
def entmax_unsettled(following, threshold, total, guess, alpha, OPTIONS: tl.constexpr):
    """Whether a row needs one more step: each squares the error at least, and the division by the sum mends the rest.

    From the right a step may pass the root by what many keys just below tau add, so less is let through there. What
    comes of a `guess` is looked at again (`entmax_missed`): one step from 0.35 passes that mostly, from more seldom.
    """
    above, below = total - 1.0, 1.0 - total
    if OPTIONS.dtype == "float32":
        most = 3e-4 if OPTIONS.power == "two" else (1e-5 if OPTIONS.power == "one" else 1e-6)
        far = (above > most) | (below > most)
    elif OPTIONS.power == "two":
        far = (above > tl.where(guess, 0.35, 1e-2)) | (below > tl.where(guess, 0.35, 1e-3))
    elif OPTIONS.power == "one":
        far = (above > 1e-3) | (below > 1e-4)
    else:
        most = tl.where(alpha > 2.0, 1e-6, 1e-3)
        far = (above > most) | (below > tl.minimum(most, 1e-4))
    return far & (following != threshold)


@triton.jit
def entmax_missed(total):
    """Whether a guessed tau is too far off: F - 1 is the error of all weights together; bfloat16 has steps of 2^-7."""
    return (total > 1.0 + 2.0**-7) | (total < 1.0 - 2.0**-7)


@triton.jit
def temperature(total, weighted_log, entropy_threshold, t0, t1, t2, t3, t4, t5, t6, t7):
    """Inverse temperature of adaptive softmax: max(poly(H), 1) where the plain softmax's entropy H is large, else 1."""
    entropy = entropy_of(total, weighted_log)
    polynomial = t0 * entropy + t1
    polynomial = polynomial * entropy + t2
    polynomial = polynomial * entropy + t3
    polynomial = polynomial * entropy + t4
    polynomial = polynomial * entropy + t5
    polynomial = polynomial * entropy + t6
    polynomial = polynomial * entropy + t7
    return tl.where(entropy > entropy_threshold, tl.maximum(polynomial, 1.0), 1.0)


@triton.jit
def settled(logits, solution, factor, alpha, state, OPTIONS: tl.constexpr, STATISTICS: tl.constexpr):
    """Weights of a tile when the row's solution (peak, inverse temperature or tau) is known, and the state."""
    peak, solved = solution
    total, weighted_log, support = state
    if OPTIONS.normalizer == "adaptive_softmax":
        logs = logits * (factor * solved)[:, None] - (peak * (factor * solved))[:, None]
        weights = tl.exp2(logs)
        if STATISTICS:
            weighted_log += sum_of_logs(weights, logs, OPTIONS)
    else:
        weights = entmax_power(entmax_excess(logits, peak, solved, factor * (alpha - 1.0)), alpha, OPTIONS)
        if STATISTICS:
            weighted_log += sum_of_logs(weights, log2(weights), OPTIONS)
            support += summed((weights != 0).to(tl.float32), OPTIONS)
    total += summed(weights, OPTIONS)
    return weights, (total, weighted_log, support)


@triton.jit
def entropy_of(total, weighted_log):
    """Entropy in nats of w / sum w: ln(sum w) - sum w ln w / sum w; 0 where every weight is 0."""
    entropy = (tl.log2(total) - weighted_log / total) * LN_2
    entropy = tl.where(entropy < 0, 0.0, entropy)
    return tl.where(total == 0, 0.0, entropy)


@triton.jit
def row_statistics(total, weighted_log, highest, lowest, visible, support, beta, OPTIONS: tl.constexpr):
    """The columns of `stats`: NaN for a row without weights to give, 0 for one that sees nothing."""
    keys = support if OPTIONS.sparse else visible
    spoilt = total * 0.0  # NaN where the sum is no number
    if not OPTIONS.pointwise:
        spoilt = tl.where(total == 0, float("nan"), spoilt)
    sees = visible > 0
    return (
        tl.where(sees, entropy_of(total, weighted_log) + spoilt, 0.0),
        tl.where(sees, keys + spoilt, 0.0),
        tl.where(sees, beta + spoilt, 0.0),
        tl.where(sees, (highest - lowest) / OPTIONS.unit + spoilt, 0.0),
    )


@triton.jit
def divided(output, total, visible, OPTIONS: tl.constexpr):
    """The rows' output from their sums: 0 for a row that sees nothing."""
    if not OPTIONS.pointwise:
        output = output / total[:, None]  # 0 / 0: a row that sees logits of -infinity only is NaN
    return tl.where(visible[:, None] > 0, output, 0.0)
