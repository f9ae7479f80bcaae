"""What makes weights of logits in a graph, found by evaluating it: softmax, entmax, SSA and what else the op has.

Between a product of queries with keys and its weights some node holds the logits: the first one from which the weights
follow by a normalizer of the op, mask and all. What is between the product and that node is left to `masks`.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from sharp.exporter.programs.attention_call import AttentionCall, OwnNorm
from sharp.exporter.programs.logits import MASKED, fold, shape_of_logits, unfold
from sharp.exporter.programs.nodes import ancestors
from sharp.exporter.programs.positions import after
from sharp.exporter.programs.program import Program
from sharp.plugins.errors import InputError
from sharp.plugins.ops.attributes import HEAD_PARAMETERS, WITHOUT_SINK
from sharp.plugins.ops.schema import TEMPERATURE_PRESETS
from sharp.plugins.ops.torch_normalizers import DEFAULT_TEMPERATURE, attention_weights

TOLERANCE = 2e-5  # of a weight, which is at most about 1; graphs compute in float32
SPREAD = 1.5  # of random logits
PLAIN = ("softmax", "sigmoid", "relu", "relu2", "softpick")
MOST_ALPHA = 4.0
NEAR, FAR = 1.0, 20.0  # logits that tell b and n of ssa
DEGREE = 4  # of the polynomials of adaptive temperature
SHARPENED = 1e-3  # an inverse temperature above 1 by less says nothing of the polynomial


def find_norm(
    program: Program, call: AttentionCall, weights: Node, given: Mapping[Node, Tensor]
) -> tuple[Node, OwnNorm] | None:
    """The node of the logits of `call`, and the normalizer that makes the node `weights` of them; None if none does.

    Raises:
        InputError: it is entmax whose alpha differs by head, which the op has not.
    """
    assert call.product is not None
    shape = shape_of_logits(program, call, given)
    start = fold(torch.zeros(shape, dtype=torch.float64), call.product)
    for logits in _cuts(program, call.product, weights):
        base = start if logits is call.product else _value(program, {**given, call.product: start}, logits)
        if base.numel() == start.numel() and base.shape[-1] == shape[-1]:
            norm = _norm(_Graph(program, given, logits, weights, base, shape), call)
            if norm is not None:
                return logits, norm
    return None


def _cuts(program: Program, product: Node, weights: Node) -> Iterator[Node]:
    """The nodes that all ways from the product to the weights go through, in order, and nothing else's ways join."""
    before = ancestors(weights, through_sizes=False)
    between = sorted(before & after(program, product), key=program.order.__getitem__)
    reach = -1  # of the users of the nodes so far
    for node in between:
        joined = ancestors(weights, through_sizes=False, until=frozenset({node})) & program.data
        alone = program.order[node] >= reach and joined <= after(program, node)
        if alone and node is not weights and isinstance(node.meta.get("val"), Tensor):
            yield node
        reach = max(reach, *(program.order[user] for user in node.users if user in before), -1)


@dataclass(frozen=True)
class _Graph:
    """A part of a graph that makes weights of logits; `base` are the logits of products that all are 0."""

    program: Program
    given: Mapping[Node, Tensor]
    logits: Node
    weights: Node
    base: Tensor
    shape: tuple[int, int, int, int]

    @property
    def visible(self) -> Tensor:
        """What is not masked [batch, heads, queries, keys]."""
        return unfold(self.base > MASKED, self.shape)

    def __call__(self, z: Tensor) -> Tensor:
        """The weights of logits `z` [batch, heads, queries, keys]; what is masked stays what the graph puts there."""
        value = torch.where(self.base > MASKED, z.reshape(self.base.shape), self.base.double())
        found = _value(self.program, {**self.given, self.logits: value}, self.weights)
        return unfold(found, self.shape).double()


def _value(program: Program, given: Mapping[Node, Tensor], node: Node) -> Tensor:
    """In float64, or in float32 where something in the graph is of that."""
    try:
        value: Tensor = program.evaluate(given, [node])[node]
    except RuntimeError:
        narrow = {one: tensor.float() if tensor.dtype == torch.float64 else tensor for one, tensor in given.items()}
        value = program.evaluate(narrow, [node])[node]
    return value


def _norm(graph: _Graph, call: AttentionCall) -> OwnNorm | None:
    z = torch.randn(graph.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * SPREAD
    try:
        found = graph(z)
    except (RuntimeError, IndexError):  # what follows takes no such values
        return None
    rows = graph.visible.any(-1)
    if not found[rows].isfinite().all():
        return None
    for normalizer in PLAIN:
        if _makes(graph, OwnNorm(normalizer), z, found):
            return OwnNorm(normalizer)
    for normalizer in WITHOUT_SINK:
        pointwise = _with_length(graph, normalizer)
        if pointwise is not None and _makes(graph, pointwise, z, found):
            return pointwise
    if not torch.allclose(found.sum(-1)[rows], torch.ones((), dtype=torch.float64), atol=1e-3):
        return None
    candidates = (_entmax(z, found), _ssa(graph), _adaptive(graph, z, found))
    norm = next((one for one in candidates if one is not None and _makes(graph, one, z, found)), None)
    if norm is None:
        _check_one_alpha(graph, z, found, call)
    return norm


def _makes(graph: _Graph, norm: OwnNorm, z: Tensor, found: Tensor) -> bool:
    """The normalizer makes the weights `found` of the logits `z`."""
    expected = attention_weights(
        norm.normalizer,
        z,
        graph.visible,
        head_params=norm.head_params,
        alpha=norm.alpha or 1.5,
        temperature_coefficients=norm.temperature_coefficients or DEFAULT_TEMPERATURE,
        entropy_threshold=norm.entropy_threshold,
    )
    difference = torch.where(graph.visible.any(-1, keepdim=True), expected - found, 0.0)  # rows without keys: any
    return bool(difference.abs().max() <= TOLERANCE * max(1.0, float(expected.max())))


def _entmax(z: Tensor, found: Tensor) -> OwnNorm | None:
    """p_j^(alpha - 1) / (alpha - 1) - z_j is the same for all keys of a row that have weight."""
    rows = (found > 1e-4).sum(-1) > 1
    if not rows.any():
        return None
    z, found = z[rows], found[rows]  # [rows, keys]
    weighted = found > 1e-4
    count = weighted.sum(-1)

    def spread(alpha: float) -> float:
        level = torch.where(weighted, found.clamp(min=1e-9) ** (alpha - 1) / (alpha - 1) - z, 0.0)
        mean = level.sum(-1, keepdim=True) / count[:, None]
        return float(torch.where(weighted, level - mean, 0.0).square().sum())

    grid = torch.linspace(1.01, MOST_ALPHA, 300).tolist()
    best = min(range(len(grid)), key=lambda index: spread(grid[index]))
    low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    for _ in range(60):  # ternary search
        third = (high - low) / 3
        if spread(low + third) < spread(high - third):
            high -= third
        else:
            low += third
    return OwnNorm("entmax", alpha=float(f"{(low + high) / 2:.6g}"))


def _check_one_alpha(graph: _Graph, z: Tensor, found: Tensor, call: AttentionCall) -> None:
    heads = [_entmax(z[:, [head]], found[:, [head]]) for head in range(z.shape[1])]
    alphas = [one.alpha for one in heads if one is not None and one.alpha is not None]
    if len(alphas) < z.shape[1]:
        return
    expected = [
        attention_weights("entmax", z[:, [head]], graph.visible[:, [head]], alpha=alpha)
        for head, alpha in enumerate(alphas)
    ]
    if (torch.cat(expected, 1) - found).abs().max() <= TOLERANCE:
        raise InputError(
            f"attention at {call.where} is entmax whose alpha differs by head, from {min(alphas):.4g} to "
            f"{max(alphas):.4g}, and Sharp's op has one for a layer; call sharp.models.normalized_attention with one"
        )


def _ssa(graph: _Graph) -> OwnNorm | None:
    """Ln w(z) / w(0) = n ln(1 + b z) for z > 0: two of them say b, and then n."""
    visible = graph.visible
    row = int(visible[0, 0].sum(-1).argmax())
    keys = visible[0, 0, row].nonzero().flatten()
    if len(keys) < 3:
        return None
    z = torch.zeros(graph.shape, dtype=torch.float64)
    z[..., keys[1]], z[..., keys[2]] = NEAR, FAR
    weights = graph(z)[0, :, row]  # [heads, keys]
    near, far = ((weights[:, keys[one]] / weights[:, keys[0]]).log() for one in (1, 2))  # [heads]
    if not ((near > 0) & (far / near < FAR) & (far > near)).all():
        return None
    low, high = torch.full_like(near, -12.0), torch.full_like(near, 12.0)  # ln b; the ratio falls as b grows
    for _ in range(100):
        middle = (low + high) / 2
        b = middle.exp()
        above = torch.log1p(FAR * b) / torch.log1p(NEAR * b) > far / near
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    b = low.exp()
    n = near / torch.log1p(NEAR * b)
    return OwnNorm("ssa", head_params=torch.stack([b, n], dim=-1).float())


def _with_length(graph: _Graph, normalizer: str) -> OwnNorm | None:
    """Sigmoid(z + bias - power ln n), relu(z) / n^power: bias and power from the weights of logits that all are 1.

    n is the number of visible keys; where it is the same in all rows, it could as well be a constant.
    """
    visible = graph.visible
    count = visible[0, 0].sum(-1)  # [queries]
    rows = count > 0
    if count[rows].unique().numel() < 2:
        return None
    weights = torch.where(visible, graph(torch.ones(graph.shape, dtype=torch.float64)), 0.0)[0][:, rows].amax(-1)
    level = torch.logit(weights) - 1 if normalizer == "sigmoid" else weights.log()  # [heads, rows]
    if not level.isfinite().all():
        return None
    log_count = count[rows].double().log()
    powers = torch.stack([torch.ones_like(log_count), -log_count], -1)[:, -len(HEAD_PARAMETERS[normalizer]) :]
    solution = torch.linalg.lstsq(powers, level.T).solution.T  # [heads, bias and power, or power]
    return OwnNorm(normalizer, head_params=(solution * 1e5).round().div(1e5).float())


def _adaptive(graph: _Graph, z: Tensor, found: Tensor) -> OwnNorm | None:
    """Weights softmax(beta z): beta of every row, and the polynomial of the entropy that they lie on."""
    visible = graph.visible
    rows = visible.sum(-1) > 1
    if not (found[rows] > 0).eq(visible[rows]).all():
        return None
    first = visible.float().argmax(-1, keepdim=True)
    logits = torch.where(visible, z - z.gather(-1, first), 0.0)
    logarithms = torch.where(visible, (found / found.gather(-1, first)).clamp(min=1e-30).log(), 0.0)
    beta = ((logits * logarithms).sum(-1) / logits.square().sum(-1).clamp(min=1e-9))[rows]
    plain = attention_weights("softmax", z, visible)
    entropy = -torch.xlogy(plain, plain).sum(-1)[rows]
    sharpened = beta > 1 + SHARPENED
    if sharpened.sum() <= DEGREE + 1:
        return None
    powers = entropy[sharpened, None] ** torch.arange(DEGREE, -1, -1)
    solution = torch.linalg.lstsq(powers, beta[sharpened, None]).solution[:, 0]
    coefficients = tuple(solution.tolist())
    presets = [tuple(one) for one in TEMPERATURE_PRESETS.values() if len(one) == DEGREE + 1]
    nearest = min(presets, key=lambda one: math.dist(one, coefficients))
    if math.dist(nearest, coefficients) < 1e-2:  # rounding of float32 would matter at entropies far from these
        coefficients = nearest
    return OwnNorm("adaptive_softmax", temperature_coefficients=coefficients)
