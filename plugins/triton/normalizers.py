"""The normalizers as a parameter of the loops: how a tile of logits updates the running sums of its rows.

Logits come without their `factor` (`logit_factor`), because a multiplication that is put off can be fused into a later
instruction. The state of a tile's rows is a tuple of
    peak          the running maximum of the logits, or of ssa's exponents; 0 where weights have a fixed scale
    total         sum of w
    weighted_log  sum of w log2 w
    highest       largest logit
    lowest        smallest visible logit
    visible       number of visible keys; decoding only
    support       number of keys with w > 0
    output        sum of w * value, [rows, value_width]
    opposed       softpick: sum of |e^z - 1| of the keys with z < 0, which have no weight; 0 for other normalizers
with w a weight before division. In decoding (`Options.spread`) each sum is kept for every place of a tile, [rows, keys]
instead of [rows], because sums over a row would wait for all warps. The peak is kept so, too, if a walk is ALONE, that
is, weighs no values. `highest`, `lowest`, `support` and, except for the entropy, `weighted_log` are kept for statistics
only. A masked key has the logit -infinity, which every normalizer gives the weight 0.
"""

import triton
import triton.language as tl

from sharp.plugins.triton.arithmetic import finite_or_zero, in_bfloat16, log2, log2_above_one
from sharp.plugins.triton.entmax import entmax_excess, entmax_power

LN_2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(1.4426950408889634)
SIGN = tl.constexpr(-(2**31))


@triton.jit
def empty_state(OPTIONS: tl.constexpr, ALONE: tl.constexpr):
    """Return the state of rows that have seen no key.

    The state is (peak, total, weighted_log, highest, lowest, visible, support, output, opposed). Sums are [rows], or
    [rows, keys] if `OPTIONS.spread`; the peak is spread only if ALONE, that is, if the walk weighs no values.
    """
    row = tl.full([OPTIONS.rows], 0, tl.float32)
    zeros = tl.full([OPTIONS.rows, OPTIONS.keys], 0, tl.float32) if OPTIONS.spread else row
    peak = (zeros if ALONE else row) - (0.0 if OPTIONS.peak_from_zero else float("inf"))
    output = tl.full([OPTIONS.rows, OPTIONS.value_width], 0, tl.float32)
    return peak, zeros, zeros, zeros - float("inf"), zeros + float("inf"), zeros, zeros, output, zeros


@triton.jit
def summed(numbers, OPTIONS: tl.constexpr):
    """Return the contribution of numbers [rows, keys] to a sum of the state: themselves if spread, else sums [rows]."""
    return numbers if OPTIONS.spread else tl.sum(numbers, 1)


@triton.jit
def widened(numbers, WIDE: tl.constexpr):
    """Return numbers [rows] as [rows, 1] if WIDE, otherwise unchanged."""
    return numbers[:, None] if WIDE else numbers


@triton.jit
def added_up(state, factor, OPTIONS: tl.constexpr, ALONE: tl.constexpr):
    """Return the state with every sum added up over the places of a row, [rows]; unchanged unless `OPTIONS.spread`.

    ALONE: the peak is spread, too, and the sums are brought to one peak. `factor` is the `logit_factor`.
    """
    if not OPTIONS.spread:
        return state
    peak, total, weighted_log, highest, lowest, visible, support, output, opposed = state
    if ALONE:
        largest = tl.max(peak, 1)
        moved = (peak - finite_or_zero(largest)[:, None]) * factor
        share = tl.exp2(moved)
        weighted_log = tl.where(share == 0, 0.0, share * (weighted_log + moved * total))
        total, peak = share * total, largest
    total, weighted_log = tl.sum(total, 1), tl.sum(weighted_log, 1)
    highest, lowest = tl.max(highest, 1), tl.min(lowest, 1)
    opposed = tl.sum(opposed, 1)
    return peak, total, weighted_log, highest, lowest, tl.sum(visible, 1), tl.sum(support, 1), output, opposed


@triton.jit
def logit_factor(scale, OPTIONS: tl.constexpr):
    """Return the factor from logits to the kernels' unit (`Options.unit`): positive, and 1 unless `scaled_late`."""
    return scale * OPTIONS.unit if OPTIONS.scaled_late else 1.0


@triton.jit
def sum_of_logs(weights, logs, OPTIONS: tl.constexpr):
    """Return the sum of w log2 w over the keys with 0 log 0 = 0, where `logs` are log2 w; w is 0 where log2 w < -150.

    The result is [rows], or [rows, keys] if sums are spread.
    """
    return summed(weights * tl.maximum(logs, -150.0), OPTIONS)


@triton.jit
def add_values(output, weights, values, scales, OPTIONS: tl.constexpr):
    """Return output [rows, value_width] + weights [rows, keys] @ values [keys, value_width] times their `scales`.

    `scales` [keys] are read for caches with scales only.
    """
    if OPTIONS.quantized:
        PARTS: tl.constexpr = OPTIONS.weight_parts
        parts = in_bfloat16(weights * scales[None, :], PARTS)
        for part in tl.static_range(0, PARTS):
            output = tl.dot(parts[part], values, output)
    elif OPTIONS.dtype == "float32":
        output = tl.dot(weights, values, output, input_precision=OPTIONS.precision)
    elif OPTIONS.wide_weights:
        output = tl.dot(weights, values.to(tl.float32), output, input_precision="tf32")
    else:
        output = tl.dot(weights.to(values.dtype), values, output)
    return output


@triton.jit
def ssa_exponents(logits, row, factor):
    """Return the base-2 exponents n sgn(z) log2(1 + b|z|) of ssa's weights (1 + b|z|)^(sgn(z) n) (SSA, Eq. 5).

    z are `logits` [rows, keys] times `factor`; b and n are the last two items of a walk's `row`.
    """
    _, _, _, _, b, n = row
    size = n[:, None] * log2_above_one(1.0 + (b * factor)[:, None] * tl.abs(logits))
    sign = logits.to(tl.int32, bitcast=True) & SIGN  # one instruction with the next; `where` takes two
    return (size.to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)


@triton.jit
def shifted_expm1(z, peak):
    """Return (e^z - 1) 2^-peak; 0 for z = -inf. A series is used near 0, where the difference would lose digits.

    `peak` is a base-2 exponent of at least 0 and z log2 e, so that nothing overflows.
    """
    one = tl.exp2(-peak)
    series = 1.0 + z * (1.0 / 9.0)
    series = 1.0 + series * z * (1.0 / 8.0)
    series = 1.0 + series * z * (1.0 / 7.0)
    series = 1.0 + series * z * (1.0 / 6.0)
    series = 1.0 + series * z * (1.0 / 5.0)
    series = 1.0 + series * z * (1.0 / 4.0)
    series = 1.0 + series * z * (1.0 / 3.0)
    series = 1.0 + series * z * (1.0 / 2.0)
    parts = tl.where(tl.abs(z) < 0.5, series * z * one, tl.exp2(z * LOG2_E - peak) - one)
    return tl.where(z == -float("inf"), 0.0, parts)


@triton.jit
def pointwise_weights(logits, row, OPTIONS: tl.constexpr):
    """Return the weights [rows, keys] of sigmoid, relu or relu2; the b of a walk's `row` is its `length_term`.

    relu is computed with `z <= 0`, because a maximum would drop a NaN.
    """
    _, _, _, _, term, _ = row
    if OPTIONS.normalizer == "sigmoid":
        logits = logits + term[:, None]
        small = tl.exp(-tl.abs(logits))
        return tl.where(logits < 0, small, 1.0) / (1.0 + small)
    positive = tl.where(logits <= 0, 0.0, logits)
    if OPTIONS.normalizer == "relu2":
        positive = positive * positive
    return positive * term[:, None]


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
    """Return the weights of a tile from one pass over the logits, the new state, and the factor of the output so far.

    `logits` are [rows, keys] without their `factor`. `state` and the new state are (peak, total, weighted_log, support,
    opposed).

    The exponential normalizers use online softmax, and with it the entropy's sum (ICML 2025, App. G): when the peak
    moves by d = old - new, weighted_log becomes 2^d (weighted_log + d total), and the output so far must be multiplied
    by 2^d. Without SHIFTED the weights are 2^exponent, unshifted, and there are no statistics; `within_range` tells
    afterwards whether the weights stayed in range.
    """
    peak, total, weighted_log, support, opposed = state
    if OPTIONS.pointwise:
        weights = pointwise_weights(logits * factor, row, OPTIONS)
        shrunk = 1.0
        total += summed(weights, OPTIONS)
        if STATISTICS:
            weighted_log += sum_of_logs(weights, log2(weights), OPTIONS)
            support += summed((weights != 0).to(tl.float32), OPTIONS)
    elif OPTIONS.normalizer == "softpick":
        z = logits * factor
        moved = tl.maximum(peak, tl.max(z, 1) * LOG2_E)
        shrunk = widened(tl.exp2(peak - moved), OPTIONS.spread)
        parts = shifted_expm1(z, moved[:, None])
        weights = tl.where(parts <= 0, 0.0, parts)  # a maximum would drop a NaN
        if STATISTICS:
            weighted_log = shrunk * (weighted_log + widened(peak - moved, OPTIONS.spread) * total)
            weighted_log += sum_of_logs(weights, log2(weights), OPTIONS)
            # Support is counted by logits, because weights may underflow float32. A NaN counts.
            support += summed(tl.where(z <= 0, 0.0, 1.0), OPTIONS)
        total = total * shrunk + summed(weights, OPTIONS)
        opposed = opposed * shrunk + summed(tl.where(parts < 0, -parts, 0.0), OPTIONS)
        peak = moved
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
    return weights, (peak, total, weighted_log, support, opposed), shrunk


@triton.jit
def within_range(total, output):
    """Return whether a row's unshifted weights stayed far from the ends of float32's range, bool [rows].

    `total` [rows] is their sum. The output [rows, value_width] must be finite, too.
    """
    return (total > 2.0**-30) & (total < 2.0**60) & (tl.sum(output * 0.0, 1) == 0)


@triton.jit
def temperature(total, weighted_log, entropy_threshold, t0, t1, t2, t3, t4, t5, t6, t7):
    """Return the inverse temperature: max(poly(H), 1) if the entropy H is above `entropy_threshold`, otherwise 1.

    H is in nats, the entropy of the plain softmax, whose sums are `total` = sum w and `weighted_log` = sum w log2 w. t0
    to t7 are the coefficients of poly, highest power first.
    """
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
    """Return a tile's weights [rows, keys] from the rows' solution, and the updated sums.

    `logits` are without their `factor`. `solution` is (peak, inverse temperature or tau), [rows] each; `state` and the
    updated sums are (total, weighted_log, support). weighted_log and support are updated with STATISTICS only.
    """
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
    """Return the entropy in nats of w / sum w, from `total` = sum w and `weighted_log` = sum w log2 w.

    The entropy is at least 0, and 0 if every weight is 0.
    """
    entropy = (tl.log2(total) - weighted_log / total) * LN_2
    entropy = tl.where(entropy < 0, 0.0, entropy)
    return tl.where(total == 0, 0.0, entropy)


@triton.jit
def sink_weight(sink, level, b, n, OPTIONS: tl.constexpr):
    """Return the weight of a sink relative to keys' weights 2^(exponent - level), for one row or several.

    `sink` is the sink's logit, -infinity for none, whose weight is 0. `level` is the peak of the keys' base-2
    exponents; `b` and `n` are read for ssa only. Not for entmax. The weight may be infinite, in which case all keys'
    weights vanish.
    """
    if OPTIONS.normalizer == "softpick":
        weight = tl.abs(shifted_expm1(sink, level))
    else:
        exponent = sink * OPTIONS.unit
        if OPTIONS.normalizer == "ssa":
            size = n * tl.log2(1.0 + b * tl.abs(sink))
            exponent = tl.where(sink < 0, -size, size)
        weight = tl.exp2(exponent - level)
    return tl.where(sink == -float("inf"), 0.0, weight)


@triton.jit
def row_statistics(
    total, opposed, weighted_log, highest, lowest, visible, support, beta, of_sink, OPTIONS: tl.constexpr
):
    """Return the columns of `stats`: NaN for a row whose weights are undefined, 0 for a row that sees nothing.

    The columns are entropy (nats), support, inverse temperature, logit spread and the sink's mass. `highest` and
    `lowest` are logits with their factor, `weighted_log` is sum w log2 w, `beta` the inverse temperature.

    The statistics are those of the keys alone; `of_sink` is the sink's weight relative to the keys', which may be
    infinite.
    """
    keys = support if OPTIONS.sparse else visible
    spoilt = total * 0.0  # NaN if the sum is NaN or infinite, otherwise 0
    if not OPTIONS.peak_from_zero:
        spoilt = tl.where((total == 0) & (of_sink == 0), float("nan"), spoilt)
    sees = visible > 0
    beside = total + opposed + of_sink
    mass = tl.where(of_sink == float("inf"), 1.0, of_sink / tl.where(beside == 0, 1.0, beside))
    return (
        tl.where(sees, entropy_of(total, weighted_log) + spoilt, 0.0),
        tl.where(sees, keys + spoilt, 0.0),
        tl.where(sees, beta + spoilt, 0.0),
        tl.where(sees, (highest - lowest) / OPTIONS.unit + spoilt, 0.0),
        tl.where(sees, mass + spoilt, 0.0),
    )


@triton.jit
def divided(output, total, visible, OPTIONS: tl.constexpr):
    """Return the rows' output [rows, value_width] from sums of w * value; 0 for a row that sees nothing (`visible` 0).

    `total` [rows] is the sum of weights, of the sink's weight, and under softpick of `opposed`. Weights of pointwise
    normalizers are not divided by it.
    """
    if OPTIONS.normalizer == "softpick":
        output = tl.where(total[:, None] == 0, 0.0, output / total[:, None])
    elif not OPTIONS.pointwise:
        output = output / total[:, None]  # 0 / 0 for a row that sees only logits of -infinity, which becomes NaN
    return tl.where(visible[:, None] > 0, output, 0.0)
