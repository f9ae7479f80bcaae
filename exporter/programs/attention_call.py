"""One attention of a graph: its query, key, value and result, and the layout of each in the graph."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.fx import Node

from sharp.exporter.programs.grid import Grid
from sharp.exporter.programs.nodes import where
from sharp.plugins.op.schema import DEFAULT_ENTROPY_THRESHOLD

Arrange = Callable[[Tensor], Tensor]


def same(tensor: Tensor) -> Tensor:
    """Return a tensor [batch, heads, tokens, dim] unchanged."""
    return tensor


@dataclass(frozen=True)
class Operand:
    """A node of a query, key or value, and the function that brings its value to [batch, heads, tokens, dim]."""

    node: Node
    arrange: Arrange = same


@dataclass(frozen=True)
class OwnNorm:
    """The normalizer of an attention, by the op's name, and its parameters.

    `alpha` is None for other normalizers than entmax, `temperature_coefficients` (highest power first) for others than
    adaptive_softmax. `head_params` [q_heads, P] are set for attention that is written out, if its normalizer has any. A
    call of Sharp's op by name has them among its arguments instead.
    """

    normalizer: str = "softmax"
    alpha: float | None = None
    head_params: Tensor | None = None
    temperature_coefficients: tuple[float, ...] | None = None
    entropy_threshold: float = DEFAULT_ENTROPY_THRESHOLD


@dataclass(frozen=True)
class WrittenOut:
    """The nodes of an attention that is written out.

    `mixed` is the product of `weights` with values. A graph may divide by the sum of the weights only after this
    product, so the normalized weights follow from `AttentionCall.result`. The normalizer takes `logits` multiplied by
    `factor`, which is a number or a tensor [heads].
    """

    product: Grid
    weights: Grid
    mixed: Node
    logits: Grid
    factor: float | Tensor = 1.0


@dataclass(frozen=True)
class AttentionCall:
    """One attention of a graph.

    `result` is the node that the op's output [batch, heads, tokens, dim] replaces, after `restore` brought the output
    to the node's layout. `written_out` is None for attention that is called by name: torch's own functions,
    flex_attention and Sharp's op. Only such attention has `arguments`, by the names in the operator's schema.
    """

    result: Node
    query: Operand
    key: Operand
    value: Operand
    restore: Arrange = same
    written_out: WrittenOut | None = None
    arguments: dict[str, Any] = field(default_factory=dict)  # arguments of a call by name
    norm: OwnNorm = OwnNorm()

    @property
    def by_name(self) -> bool:
        """Whether this attention is a call of Sharp's own op."""
        return "normalizer" in self.arguments

    @property
    def flexible(self) -> bool:
        """Whether this attention is a call of flex_attention, which has its own functions for logits and masks."""
        return "score_mod" in self.arguments

    @property
    def where(self) -> str:
        """The place of the attention in the user's module, for a message."""
        return where(self.result)


def rank(node: Node) -> int:
    """Return the number of dimensions of a node's value."""
    return int(node.meta["val"].dim())


def one_head(tensor: Tensor) -> Tensor:
    """Add the dimension of heads: [batch, tokens, dim] -> [batch, 1, tokens, dim]."""
    return tensor.unsqueeze(1)


def one_head_transposed(tensor: Tensor) -> Tensor:
    """Transpose and add the dimension of heads: [batch, dim, tokens] -> [batch, 1, tokens, dim]."""
    return tensor.unsqueeze(1).transpose(-1, -2)


def no_head(tensor: Tensor) -> Tensor:
    """Remove the dimension of heads: [batch, 1, tokens, dim] -> [batch, tokens, dim]."""
    return tensor.squeeze(1)
