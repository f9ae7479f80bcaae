"""The normalizers in standard ONNX ops: masked logits -> weights and statistics."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sharp.plugins.ops.node_list import NodeList

ENTMAX_STEPS = 20
"""Newton steps of the entmax threshold, from tau = -1: 10 reach float32 up to alpha = 2.25, 20 up to alpha = 3."""

LOWEST = -3.0e38


@dataclass(frozen=True)
class MaskedLogits:
    """Names of the values that a normalizer starts from; the row's keys are the last axis."""

    logits: str  # float32 [..., q_heads, queries, keys]
    visible: str  # bool [..., 1, queries, keys]
    count: str  # float32 [..., 1, queries, 1], visible keys
    head_params: str  # float32 [q_heads, P], empty when absent


@dataclass(frozen=True)
class Weights:
    """Names of a normalizer's results: weights [..., q_heads, queries, keys], inverse temperature [..., 1]."""

    weights: str
    inverse_temperature: str


def normalize(nodes: NodeList, rows: MaskedLogits, normalizer: str, coefficients: Sequence[float]) -> Weights:
    """Append the nodes of `normalizer`; a row without visible keys has weights 0."""
    one = nodes.constant(1.0)
    zero = nodes.constant(0.0)
    match normalizer:
        case "softmax":
            return Weights(_softmax(nodes, rows.logits, rows.visible), one)
        case "ssa":
            return Weights(_softmax(nodes, _ssa_exponents(nodes, rows), rows.visible), one)
        case "adaptive_softmax":
            beta = _inverse_temperature(nodes, _softmax(nodes, rows.logits, rows.visible), coefficients)
            return Weights(_softmax(nodes, nodes.op("Mul", beta, rows.logits), rows.visible), beta)
        case "entmax":
            return Weights(_entmax(nodes, rows), one)
        case "sigmoid":
            weights = _sigmoid(nodes, rows.logits)
        case "relu":
            weights = nodes.op("Relu", rows.logits)
        case _:
            positive = nodes.op("Relu", rows.logits)
            weights = nodes.op("Mul", positive, positive)
    return Weights(nodes.op("Where", rows.visible, weights, zero), one)


def statistics(nodes: NodeList, rows: MaskedLogits, result: Weights, normalizer: str) -> str:
    """The four statistics of every row, [..., q_heads, queries, 4]; 0 where no key is visible."""
    zero = nodes.constant(0.0)
    sparse = normalizer in ("entmax", "relu", "relu2")
    positive = nodes.op("Greater", result.weights, zero) if sparse else rows.visible
    support = nodes.reduce("ReduceSum", nodes.op("Cast", positive, to=1))
    lowest, highest = nodes.constant(LOWEST), nodes.constant(-LOWEST)
    top = nodes.reduce("ReduceMax", nodes.op("Where", rows.visible, rows.logits, lowest))
    bottom = nodes.reduce("ReduceMin", nodes.op("Where", rows.visible, rows.logits, highest))
    entropy = _entropy(nodes, _divide_by_sum(nodes, result.weights))
    shape = nodes.op("Shape", entropy)
    columns = [entropy, support, result.inverse_temperature, nodes.op("Sub", top, bottom)]
    stacked = nodes.op("Concat", *(nodes.op("Expand", column, shape) for column in columns), axis=-1)
    return nodes.op("Where", nodes.op("Equal", rows.count, zero), zero, stacked)


def write_stats(nodes: NodeList, stats: str, has_collect_stats: bool) -> None:
    """The op's output `stats`: the statistics if `collect_stats` is given and true, else zeros."""
    collect = "collect_stats" if has_collect_stats else nodes.op("Cast", nodes.constant(0.0), to=9)
    nodes.op("Where", collect, stats, nodes.constant(0.0), name="stats")


def _divide_by_sum(nodes: NodeList, weights: str) -> str:
    total = nodes.reduce("ReduceSum", weights)
    none = nodes.op("Equal", total, nodes.constant(0.0))
    return nodes.op("Div", weights, nodes.op("Where", none, nodes.constant(1.0), total))


def _masked_top(nodes: NodeList, values: str, visible: str) -> str:
    return nodes.reduce("ReduceMax", nodes.op("Where", visible, values, nodes.constant(LOWEST)))


def _softmax(nodes: NodeList, exponents: str, visible: str) -> str:
    shifted = nodes.op("Sub", exponents, _masked_top(nodes, exponents, visible))
    weights = nodes.op("Where", visible, nodes.op("Exp", shifted), nodes.constant(0.0))
    return _divide_by_sum(nodes, weights)


def _ssa_exponents(nodes: NodeList, rows: MaskedLogits) -> str:
    """The t with softmax(t) proportional to (1 + b|z|)^(sgn(z) n): t = n sgn(z) ln(1 + b|z|) (SSA, Eq. 5)."""
    b, n = (
        nodes.unsqueeze(nodes.op("Gather", rows.head_params, nodes.constant(column, np.int64), axis=1), 1, 2)
        for column in (0, 1)
    )
    grown = nodes.op("Add", nodes.constant(1.0), nodes.op("Mul", b, nodes.op("Abs", rows.logits)))
    signed = nodes.op("Mul", nodes.op("Sign", rows.logits), nodes.op("Log", grown))
    return nodes.op("Mul", n, signed)


def _entropy(nodes: NodeList, probabilities: str) -> str:
    """-sum p ln p, [.., keys] -> [.., 1]."""
    positive = nodes.op("Greater", probabilities, nodes.constant(0.0))
    log = nodes.op("Log", nodes.op("Where", positive, probabilities, nodes.constant(1.0)))
    return nodes.op("Neg", nodes.reduce("ReduceSum", nodes.op("Mul", probabilities, log)))


def _sigmoid(nodes: NodeList, logits: str) -> str:
    # Not the Sigmoid op: ONNX Runtime's is off by 1e-7 even where the result is 1e-7.
    one = nodes.constant(1.0)
    e = nodes.op("Exp", nodes.op("Neg", nodes.op("Abs", logits)))
    negative = nodes.op("Less", logits, nodes.constant(0.0))
    return nodes.op("Div", nodes.op("Where", negative, e, one), nodes.op("Add", one, e))


def _inverse_temperature(nodes: NodeList, probabilities: str, coefficients: Sequence[float]) -> str:
    """max(poly(H), 1) where the entropy is above the threshold, else 1."""
    entropy = _entropy(nodes, probabilities)
    polynomial = nodes.constant(0.0)
    for coefficient in coefficients:
        polynomial = nodes.op("Add", nodes.op("Mul", polynomial, entropy), nodes.constant(coefficient))
    one = nodes.constant(1.0)
    above = nodes.op("Greater", entropy, nodes.attribute("entropy_threshold", "float"))
    return nodes.op("Where", above, nodes.op("Max", polynomial, one), one)


def _entmax(nodes: NodeList, rows: MaskedLogits) -> str:
    """Eq. 2 of ASEntmax's paper, p = [s - tau]_+^k with s = (alpha - 1)(z - max z) and k = 1 / (alpha - 1).

    A fixed number of Newton steps from tau = -1; a step that does not stay inside the bracket becomes a bisection (the
    ends count as outside: steps from one end to the other would go on for ever). With
    F = sum x^k and G = sum x^(k-1) of x = [s - tau]_+, the step is that of F^(1/k) - 1 for k >= 1 (climbs to the root
    from the left), and that of F - 1 for k < 1.
    """
    zero, one, half = nodes.constant(0.0), nodes.constant(1.0), nodes.constant(0.5)
    tiny = nodes.constant(1e-30)
    alpha_minus_1 = nodes.op("Sub", nodes.attribute("alpha", "float"), one)
    minus_1_over_k = nodes.op("Neg", alpha_minus_1)
    k = nodes.op("Div", one, alpha_minus_1)
    steep = nodes.op("GreaterOrEqual", k, one)
    shifted = nodes.op("Sub", rows.logits, _masked_top(nodes, rows.logits, rows.visible))
    # -2 lies left of every tau, so a hidden key has weight 0 from here on without a mask.
    s = nodes.op("Where", rows.visible, nodes.op("Mul", alpha_minus_1, shifted), nodes.constant(-2.0))
    high = nodes.op("Neg", nodes.op("Pow", nodes.op("Max", rows.count, one), minus_1_over_k))
    low = nodes.op("Sub", nodes.op("Mul", high, zero), one)
    tau = low
    for _ in range(ENTMAX_STEPS):
        tau, low, high = (_same_value(nodes, value) for value in (tau, low, high))
        x = nodes.op("Relu", nodes.op("Sub", s, tau))
        powers = nodes.op("Pow", x, k)
        divisor = nodes.op("Where", nodes.op("Greater", x, zero), x, one)
        total = nodes.op("Max", nodes.reduce("ReduceSum", powers), tiny)
        slope = nodes.op("Max", nodes.reduce("ReduceSum", nodes.op("Div", powers, divisor)), tiny)
        left = nodes.op("GreaterOrEqual", total, one)
        low, high = nodes.op("Where", left, tau, low), nodes.op("Where", left, high, tau)
        root = nodes.op("Pow", total, minus_1_over_k)
        by_norm = nodes.op("Mul", nodes.op("Sub", one, root), nodes.op("Div", total, slope))
        plain = nodes.op("Div", nodes.op("Sub", total, one), nodes.op("Mul", k, slope))
        newton = nodes.op("Add", tau, nodes.op("Where", steep, by_norm, plain))
        inside = nodes.op("And", nodes.op("Greater", newton, low), nodes.op("Less", newton, high))
        inside = nodes.op("Or", inside, nodes.op("Equal", newton, tau))
        tau = nodes.op("Where", inside, newton, nodes.op("Mul", half, nodes.op("Add", low, high)))
    weights = nodes.op("Pow", nodes.op("Relu", nodes.op("Sub", s, tau)), k)
    return _divide_by_sum(nodes, weights)


def _same_value(nodes: NodeList, value: str) -> str:
    """`value` [.., 1] again, through a Gather.

    TensorRT-RTX 1.7 follows every path through a chain of elementwise ops: its build time grew tenfold with each Newton
    step (55 s at six). A Gather ends such a chain.
    """
    return nodes.op("Gather", value, nodes.constant([0]), axis=-1)
