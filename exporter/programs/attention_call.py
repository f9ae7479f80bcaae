"""One attention of a graph: its query, key, value and result, and how each is laid out there."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.fx import Node

from sharp.exporter.programs.nodes import where
from sharp.plugins.ops.schema import DEFAULT_ENTROPY_THRESHOLD

Arrange = Callable[[Tensor], Tensor]


def same(tensor: Tensor) -> Tensor:
    """[batch, heads, tokens, dim] already."""
    return tensor


@dataclass(frozen=True)
class Operand:
    """A node, and how its value becomes [batch, heads, tokens, dim]."""

    node: Node
    arrange: Arrange = same


@dataclass(frozen=True)
class OwnNorm:
    """The normalizer of an attention, by the op's name, and its parameters.

    `head_params` [q_heads, P] are those of an attention that is written out; one by name has them in its arguments.
    """

    normalizer: str = "softmax"
    alpha: float | None = None
    head_params: Tensor | None = None
    temperature_coefficients: tuple[float, ...] | None = None
    entropy_threshold: float = DEFAULT_ENTROPY_THRESHOLD


@dataclass(frozen=True)
class AttentionCall:
    """One attention of a graph.

    `result` is the node whose value the op's output takes, after `restore`. Of attention that is written out, `product`
    is the node of query times key and `logits` what goes into the normalizer.
    """

    result: Node
    query: Operand
    key: Operand
    value: Operand
    restore: Arrange = same
    product: Node | None = None
    logits: Node | None = None
    arguments: dict[str, Any] = field(default_factory=dict)  # of a call by name
    norm: OwnNorm = OwnNorm()

    @property
    def by_name(self) -> bool:
        """It is a call of Sharp's own op."""
        return "normalizer" in self.arguments

    @property
    def flexible(self) -> bool:
        """It is a call of flex_attention, with functions of its own for logits and masks."""
        return "score_mod" in self.arguments

    @property
    def where(self) -> str:
        """The place in the user's module."""
        return where(self.result)


def rank(node: Node) -> int:
    """The number of dimensions."""
    return int(node.meta["val"].dim())


def one_head(tensor: Tensor) -> Tensor:
    """[batch, tokens, dim] -> [batch, 1, tokens, dim]."""
    return tensor.unsqueeze(1)


def one_head_transposed(tensor: Tensor) -> Tensor:
    """[batch, dim, tokens] -> [batch, 1, tokens, dim]."""
    return tensor.unsqueeze(1).transpose(-1, -2)


def no_head(tensor: Tensor) -> Tensor:
    """[batch, 1, tokens, dim] -> [batch, tokens, dim]."""
    return tensor.squeeze(1)
