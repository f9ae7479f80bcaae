"""The normalizers in standard ONNX ops: masked logits -> weights and statistics."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from sharp.plugins.op import custom_normalizer as custom
from sharp.plugins.op.attributes import HEAD_PARAMETERS, NORMALIZERS, SPARSE, WITHOUT_SINK, has_place_for_sink
from sharp.plugins.op.custom_body import write_weights
from sharp.plugins.op.node_list import NodeList

ENTMAX_STEPS = 64
"""The maximum number of steps to entmax's threshold from tau = -1. Newton takes 10; bisection takes 25 to 60."""
NEWTON_STEPS = 10

LOWEST = -3.0e38
_MINUS_INFINITY = onnx.helper.make_tensor("value", onnx.TensorProto.FLOAT, [1], [-np.inf])


@dataclass(frozen=True)
class MaskedLogits:
    """The names of the ONNX values that a normalizer reads: logits, mask, number of visible keys and parameters.

    Logits are [..., q_heads, queries, keys]. A row is the keys of one query and head.
    """

    logits: str  # float32 [..., q_heads, queries, keys]
    visible: str  # bool [..., 1, queries, keys]
    count: str  # float32 [..., 1, queries, 1], visible keys
    head_params: str  # float32 [q_heads, P], empty when absent
    sinks: str = ""  # float32 [q_heads, 1, 1], empty when absent


@dataclass(frozen=True)
class WeightNames:
    """The names of a normalizer's results: weights [..., q_heads, queries, keys], inverse temperature [..., 1].

    `among_keys` names the weights without the sink, which the statistics are computed from; empty means `weights`.
    `of_sink` names the sink's mass [..., 1]; empty means 0.
    """

    weights: str
    inverse_temperature: str
    among_keys: str = ""  # weights for the statistics, without the sink; empty: `weights`
    of_sink: str = ""  # the sink's mass [..., 1]; empty: 0


def sinks_of(nodes: NodeList, normalizer: str, given: frozenset[str]) -> str:
    """Append and return the sinks [q_heads, 1, 1], the last column of `head_params`; -inf if that column is absent.

    Return "" if `head_params` is not in `given`, or if the normalizer has no place for a sink.
    """
    if "head_params" not in given:
        return ""
    own = len(HEAD_PARAMETERS.get(normalizer, ()))
    if not has_place_for_sink(normalizer):
        return ""
    if own == 0:  # the only column is the sink; the reshape fails if there is a second one
        return nodes.reshape("head_params", nodes.dimension("query", 1), 1, 1)
    none = nodes.op("ConstantOfShape", nodes.shape(nodes.dimension("head_params", 0), 1), value=_MINUS_INFINITY)
    columns = nodes.op("Concat", "head_params", none, axis=1)
    return nodes.unsqueeze(nodes.op("Gather", columns, nodes.constant(own, np.int64), axis=1), 1, 2)


def normalize(nodes: NodeList, rows: MaskedLogits, normalizer: str, coefficients: Sequence[float]) -> WeightNames:
    """Append the nodes of `normalizer` and return the names of its results; hidden keys have the weight 0.

    `coefficients` are adaptive_softmax's polynomial, highest power first; alpha and the entropy threshold are read from
    the function's attributes. A row without visible keys has weights 0.

    Raises:
        SharpError: a user's normalizer is not installed, or its body fails.
    """
    one = nodes.constant(1.0)
    zero = nodes.constant(0.0)
    match normalizer:
        case "softmax":
            return _softmax(nodes, rows.logits, rows.visible, rows.sinks, one)
        case "ssa":
            of_keys, of_sinks = (
                value and _ssa_exponents(nodes, rows.head_params, value) for value in (rows.logits, rows.sinks)
            )
            return _softmax(nodes, of_keys, rows.visible, of_sinks, one)
        case "adaptive_softmax":
            plain = _softmax(nodes, rows.logits, rows.visible, "", one)
            beta = _inverse_temperature(nodes, plain.weights, coefficients)
            return _softmax(nodes, nodes.op("Mul", beta, rows.logits), rows.visible, rows.sinks, beta)
        case "entmax":
            return _entmax(nodes, rows)
        case "softpick":
            return _softpick(nodes, rows)
        case "sigmoid":
            logits = rows.logits
            if rows.head_params:
                bias, power = _columns(nodes, rows.head_params, normalizer)
                logits = nodes.op("Add", logits, nodes.op("Sub", bias, nodes.op("Mul", power, _log_count(nodes, rows))))
            weights = _sigmoid(nodes, logits)
        case "relu" | "relu2":
            weights = nodes.op("Relu", rows.logits)
            if normalizer == "relu2":
                weights = nodes.op("Mul", weights, weights)
            if rows.head_params:
                (power,) = _columns(nodes, rows.head_params, normalizer)
                exponent = nodes.op("Neg", nodes.op("Mul", power, _log_count(nodes, rows)))
                weights = nodes.op("Mul", weights, nodes.op("Exp", exponent))
        case _:
            weights = write_weights(nodes, normalizer, rows.logits, rows.visible)
    return WeightNames(nodes.op("Where", rows.visible, weights, zero), one)


def statistics(nodes: NodeList, rows: MaskedLogits, result: WeightNames, normalizer: str, columns: int) -> str:
    """Append the first `columns` statistics of every row, [..., q_heads, queries, columns]; 0 if no key is visible.

    The statistics are entropy (nats), support, inverse temperature, logit spread and the sink's mass. All are NaN in a
    row whose weights are undefined.
    """
    zero = nodes.constant(0.0)
    sparse = normalizer in SPARSE or (normalizer not in NORMALIZERS and custom.get(normalizer).sparse)
    among_keys = result.among_keys or result.weights
    positive = nodes.op("Greater", among_keys, zero) if sparse else rows.visible
    if normalizer == "softpick":  # counted by logits, as in `op/normalizers.py`
        positive = nodes.op("And", rows.visible, nodes.op("Greater", rows.logits, zero))
    support = nodes.reduce("ReduceSum", nodes.op("Cast", positive, to=1))
    lowest, highest = nodes.constant(LOWEST), nodes.constant(-LOWEST)
    top = nodes.reduce("ReduceMax", nodes.op("Where", rows.visible, rows.logits, lowest))
    bottom = nodes.reduce("ReduceMin", nodes.op("Where", rows.visible, rows.logits, highest))
    entropy = _entropy(nodes, _divide_by_sum(nodes, among_keys))
    shape = nodes.op("Shape", entropy)
    found = [entropy, support, result.inverse_temperature, nodes.op("Sub", top, bottom), result.of_sink or zero]
    stacked = nodes.op("Concat", *(nodes.op("Expand", column, shape) for column in found[:columns]), axis=-1)
    # NaN equals nothing, so this replaces all statistics of a row whose weights are undefined by its entropy, NaN.
    defined = nodes.op("Where", nodes.op("Equal", entropy, entropy), stacked, entropy)
    return nodes.op("Where", nodes.op("Equal", rows.count, zero), zero, defined)


def write_stats(nodes: NodeList, stats: str, has_collect_stats: bool) -> None:
    """Append the op's output `stats`: the value named `stats` if `collect_stats` is given and true, otherwise zeros."""
    collect = "collect_stats" if has_collect_stats else nodes.op("Cast", nodes.constant(0.0), to=9)
    nodes.op("Where", collect, stats, nodes.constant(0.0), name="stats")


def _divide_by_sum(nodes: NodeList, weights: str) -> str:
    """Append the division of each row (the last axis) by its sum, and return its name; a row of sum 0 stays 0."""
    total = nodes.reduce("ReduceSum", weights)
    none = nodes.op("Equal", total, nodes.constant(0.0))
    return nodes.op("Div", weights, nodes.op("Where", none, nodes.constant(1.0), total))


def _masked_top(nodes: NodeList, values: str, visible: str) -> str:
    """Append the maximum of each row's visible values, [..., 1], and return its name. No visible key gives `LOWEST`."""
    return nodes.reduce("ReduceMax", nodes.op("Where", visible, values, nodes.constant(LOWEST)))


def _softmax(nodes: NodeList, exponents: str, visible: str, sinks: str, inverse_temperature: str) -> WeightNames:
    """Append the softmax of `exponents` over the visible keys, and a sink if `sinks` is not "".

    All arguments are names of values: `exponents` and `visible` are [..., queries, keys], `sinks` [q_heads, 1, 1].
    `inverse_temperature` is passed on to the result.
    """
    top = _masked_top(nodes, exponents, visible)
    shifted = nodes.op("Sub", exponents, top)
    grown = nodes.op("Where", visible, nodes.op("Exp", shifted), nodes.constant(0.0))
    among_keys = _divide_by_sum(nodes, grown)
    if not sinks:
        return WeightNames(among_keys, inverse_temperature)
    # The share that the sink leaves the keys. The sink may be far above all keys.
    total = nodes.reduce("ReduceSum", grown)
    share = nodes.op("Div", total, nodes.op("Add", total, nodes.op("Exp", nodes.op("Sub", sinks, top))))
    weights = nodes.op("Where", visible, nodes.op("Mul", among_keys, share), nodes.constant(0.0))
    # The sink's mass is not computed as 1 - share, which would lose all digits of a small mass.
    one = nodes.constant(1.0)
    of_sink = nodes.op(
        "Div", one, nodes.op("Add", one, nodes.op("Mul", total, nodes.op("Exp", nodes.op("Sub", top, sinks))))
    )
    return WeightNames(weights, inverse_temperature, among_keys, of_sink)


def _softpick(nodes: NodeList, rows: MaskedLogits) -> WeightNames:
    """Append softpick: max(e^z - 1, 0) / sum |e^z - 1| (Zuhri et al. 2025).

    Numerator and denominator are divided by e^m with m = max(z, 0) of the row.
    """
    zero = nodes.constant(0.0)
    top = nodes.op("Max", _masked_top(nodes, rows.logits, rows.visible), zero)
    one_shifted = nodes.op("Exp", nodes.op("Neg", top))

    def parts(logits: str) -> str:
        """Return (e^z - 1) e^-m. e^z - 1 is computed as tanh(z / 2) (e^z + 1), which loses nothing near 0."""
        both = nodes.op("Add", nodes.op("Exp", nodes.op("Sub", logits, top)), one_shifted)
        product = nodes.op("Mul", nodes.op("Tanh", nodes.op("Mul", logits, nodes.constant(0.5))), both)
        return nodes.op("Where", nodes.op("LessOrEqual", logits, nodes.constant(LOWEST)), zero, product)

    of_keys = nodes.op("Where", rows.visible, parts(rows.logits), zero)
    positive = nodes.op("Where", nodes.op("LessOrEqual", of_keys, zero), zero, of_keys)
    total = nodes.reduce("ReduceSum", nodes.op("Abs", of_keys))
    one, of_sink = nodes.constant(1.0), ""
    if rows.sinks:
        size = nodes.op("Abs", parts(rows.sinks))  # infinite if the sink is far above all keys
        of_sink = nodes.op("Div", one, nodes.op("Add", one, nodes.op("Div", total, size)))
        of_sink = nodes.op("Where", nodes.op("Equal", size, zero), zero, of_sink)
        total = nodes.op("Add", total, size)
    divisor = nodes.op("Where", nodes.op("Equal", total, zero), one, total)
    return WeightNames(nodes.op("Div", positive, divisor), one, positive, of_sink)


def _columns(nodes: NodeList, head_params: str, normalizer: str) -> list[str]:
    """Return the normalizer's own columns of `head_params`, each [q_heads, 1, 1]."""
    own = len(HEAD_PARAMETERS[normalizer])
    if normalizer in WITHOUT_SINK:  # the reshape fails if there are other columns
        head_params = nodes.reshape(head_params, nodes.dimension("query", 1), own)
    columns = (nodes.op("Gather", head_params, nodes.constant(column, np.int64), axis=1) for column in range(own))
    return [nodes.unsqueeze(column, 1, 2) for column in columns]


def _log_count(nodes: NodeList, rows: MaskedLogits) -> str:
    """Append ln n of the number n of visible keys (0 if no key is visible), and return its name."""
    return nodes.op("Log", nodes.op("Max", rows.count, nodes.constant(1.0)))


def _ssa_exponents(nodes: NodeList, head_params: str, logits: str) -> str:
    """Return t with softmax(t) proportional to (1 + b|z|)^(sgn(z) n): t = n sgn(z) ln(1 + b|z|) (SSA, Eq. 5)."""
    b, n = _columns(nodes, head_params, "ssa")
    grown = nodes.op("Add", nodes.constant(1.0), nodes.op("Mul", b, nodes.op("Abs", logits)))
    signed = nodes.op("Mul", nodes.op("Sign", logits), nodes.op("Log", grown))
    return nodes.op("Mul", n, signed)


def _entropy(nodes: NodeList, probabilities: str) -> str:
    """Append -sum p ln p of probabilities [..., keys] as [..., 1], and return its name."""
    positive = nodes.op("Greater", probabilities, nodes.constant(0.0))
    log = nodes.op("Log", nodes.op("Where", positive, probabilities, nodes.constant(1.0)))
    return nodes.op("Neg", nodes.reduce("ReduceSum", nodes.op("Mul", probabilities, log)))


def _sigmoid(nodes: NodeList, logits: str) -> str:
    """Append 1 / (1 + e^-z) of `logits`, and return its name."""
    # The Sigmoid op is not used, because ONNX Runtime's is off by 1e-7 even if the result is 1e-7.
    one = nodes.constant(1.0)
    e = nodes.op("Exp", nodes.op("Neg", nodes.op("Abs", logits)))
    negative = nodes.op("Less", logits, nodes.constant(0.0))
    return nodes.op("Div", nodes.op("Where", negative, e, one), nodes.op("Add", one, e))


def _inverse_temperature(nodes: NodeList, probabilities: str, coefficients: Sequence[float]) -> str:
    """Append max(poly(H), 1), or 1 if the entropy H is below the threshold, and return its name."""
    entropy = _entropy(nodes, probabilities)
    polynomial = nodes.constant(0.0)
    for coefficient in coefficients:
        polynomial = nodes.op("Add", nodes.op("Mul", polynomial, entropy), nodes.constant(coefficient))
    one = nodes.constant(1.0)
    above = nodes.op("Greater", entropy, nodes.attribute("entropy_threshold", "float"))
    return nodes.op("Where", above, nodes.op("Max", polynomial, one), one)


def _entmax(nodes: NodeList, rows: MaskedLogits) -> WeightNames:
    """Append entmax, Eq. 2 of ASEntmax: p = [s - tau]_+^k with s = (alpha - 1)(z - max z) and k = 1 / (alpha - 1).

    Newton steps go from tau = -1 until no row moves. A step that does not stay inside the bracket becomes a bisection;
    the ends count as outside, because steps from one end to the other would never stop. With x = [s - tau]_+, F = sum
    x^k and G = sum x^(k-1), the step for k >= 1 is Newton's on F^(1/k) - 1, which climbs to the root from the left, and
    for k < 1 Newton's on F - 1. For k < 1 the steps go on until the bracket holds no number. The lowest keys above the
    bracket then share what the other weights leave of 1: their weights are roots of an order that no float32 tau can
    give.
    """
    zero, one, half = nodes.constant(0.0), nodes.constant(1.0), nodes.constant(0.5)
    tiny, last_axis = nodes.constant(1e-30), nodes.constant([-1])
    alpha_minus_1 = nodes.op("Sub", nodes.attribute("alpha", "float"), one)
    minus_1_over_k = nodes.op("Neg", alpha_minus_1)
    k = nodes.op("Div", one, alpha_minus_1)
    steep = nodes.op("GreaterOrEqual", k, one)
    top, count = _masked_top(nodes, rows.logits, rows.visible), rows.count
    if rows.sinks:
        top, count = nodes.op("Max", top, rows.sinks), nodes.op("Add", count, one)
    shifted = nodes.op("Sub", rows.logits, top)
    # -2 is below every tau, so a hidden key has weight 0 from here on without a mask.
    s = nodes.op("Where", rows.visible, nodes.op("Mul", alpha_minus_1, shifted), nodes.constant(-2.0))
    # TensorRT requires a loop's values to keep their first shape, so they are expanded before the loop.
    each = nodes.op("Shape", top)
    if rows.sinks:  # the sink is one more logit behind the keys
        of_sinks = nodes.op("Mul", alpha_minus_1, nodes.op("Sub", rows.sinks, top))
        s = nodes.op("Concat", s, nodes.op("Expand", of_sinks, each), axis=-1)
    low = nodes.op("Expand", nodes.constant(-1.0), each)
    nearest = nodes.op("Neg", nodes.op("Pow", nodes.op("Max", count, one), minus_1_over_k))
    high = nodes.op("Expand", nearest, each)

    def newton_step(body: NodeList, values: list[str]) -> tuple[str, list[str]]:
        """Append one step of the search for tau to a loop's body.

        `values` names tau, its bounds low and high, and the step. Return the name of the condition to go on, and the
        names of the four new values.
        """
        tau, low, high, step = values
        x = body.op("Relu", body.op("Sub", s, tau))
        powers = body.op("Pow", x, k)
        divisor = body.op("Where", body.op("Greater", x, zero), x, one)
        total = body.op("Max", body.op("ReduceSum", powers, last_axis, keepdims=1), tiny)
        slope = body.op("Max", body.op("ReduceSum", body.op("Div", powers, divisor), last_axis, keepdims=1), tiny)
        left = body.op("GreaterOrEqual", total, one)
        low, high = body.op("Where", left, tau, low), body.op("Where", left, high, tau)
        root = body.op("Pow", total, minus_1_over_k)
        by_norm = body.op("Mul", body.op("Sub", one, root), body.op("Div", total, slope))
        plain = body.op("Div", body.op("Sub", total, one), body.op("Mul", k, slope))
        newton = body.op("Add", tau, body.op("Where", steep, by_norm, plain))
        stays = body.op("And", body.op("Equal", newton, tau), steep)

        def inside(value: str) -> str:
            """Append whether a value lies between the bounds, and return its name."""
            return body.op("And", body.op("Greater", value, low), body.op("Less", value, high))

        middle = body.op("Mul", half, body.op("Add", low, high))
        middle = body.op("Where", body.op("Or", inside(middle), steep), middle, tau)
        # For k < 1 the slope is infinite next to a key that is about to get a weight, so Newton steps become ever
        # shorter.
        quick = body.op("Or", steep, body.op("Less", step, body.constant(float(NEWTON_STEPS))))
        taken = body.op("Or", body.op("And", inside(newton), quick), stays)
        following = body.op("Where", taken, newton, middle)
        moves = body.op("Cast", body.op("Not", body.op("Equal", following, tau)), to=1)
        go_on = body.op("Cast", body.op("ReduceSum", moves, keepdims=0), to=9)
        return go_on, [following, low, high, body.op("Add", step, one)]

    tau, low, high, _ = nodes.loop(ENTMAX_STEPS, [low, low, high, zero], newton_step)
    low, high = (nodes.op("Where", steep, tau, end) for end in (low, high))
    above = nodes.op("Greater", s, low)
    lowest = nodes.reduce("ReduceMin", nodes.op("Where", above, s, one))
    last = nodes.op("And", above, nodes.op("LessOrEqual", s, nodes.op("Where", steep, tau, lowest)))
    weights = nodes.op("Pow", nodes.op("Relu", nodes.op("Sub", s, high)), k)
    weights = nodes.op("Where", last, zero, weights)
    keys = nodes.reduce("ReduceSum", nodes.op("Cast", last, to=1))
    left = nodes.op("Relu", nodes.op("Sub", one, nodes.reduce("ReduceSum", weights)))
    weights = nodes.op("Where", last, nodes.op("Div", left, nodes.op("Max", keys, one)), weights)
    weights = _divide_by_sum(nodes, weights)
    if not rows.sinks:
        return WeightNames(weights, one)
    first, end, behind = nodes.constant([0]), nodes.constant([-1]), nodes.constant([2**62])
    of_keys = nodes.op("Slice", weights, first, end, last_axis)
    return WeightNames(of_keys, one, of_sink=nodes.op("Slice", weights, end, behind, last_axis))
