"""Nodes with a number for every pair of a query and a key, in any layout."""

from dataclasses import dataclass

from torch import Tensor
from torch.fx import Node

Shape = tuple[int, int, int, int]  # batch, heads, queries, keys


@dataclass(frozen=True)
class Grid:
    """A node of logits or weights, and its layout.

    `order` lists the node's dimensions in the order batch, heads, queries, keys. With grouped queries, there are two
    dimensions of heads, those of KV heads and of the group; if heads are folded into the batch, there is none.
    """

    node: Node
    order: tuple[int, ...]

    def fold(self, values: Tensor) -> Tensor:
        """Bring values [batch, heads, queries, keys] to the layout of the node."""
        rank = len(self.order)
        if rank == 5:
            values = values.unflatten(1, (int(self.node.meta["val"].shape[self.order[1]]), -1))
        elif rank == 3:
            values = values.squeeze(1) if values.shape[1] == 1 else values.flatten(0, 1)
        return values.permute([self.order.index(dimension) for dimension in range(rank)])

    def unfold(self, values: Tensor, shape: Shape) -> Tensor:
        """Bring the node's value to `shape` [batch, heads, queries, keys]; a single head is repeated for all heads."""
        values = values.permute(self.order)
        return values.expand(shape) if values.dim() == 4 else values.reshape(shape)

    def at(self, node: Node) -> "list[Grid]":
        """Return the layouts that another node between logits and weights may have: this one, and it transposed.

        A node of another rank may be a product of matrices; the list is empty if its rank is neither 3 nor 4.
        """
        rank = node.meta["val"].dim()
        if rank == len(self.order):
            return [Grid(node, self.order), Grid(node, (*self.order[:-2], *self.order[:-3:-1]))]
        return [matrix(node), matrix(node, turned=True)] if rank in (3, 4) else []


def matrix(node: Node, *, turned: bool = False) -> Grid:
    """Return the layout of a product of matrices: [..., queries, keys], or [..., keys, queries] if `turned`."""
    rank = node.meta["val"].dim()
    last = (rank - 1, rank - 2) if turned else (rank - 2, rank - 1)
    return Grid(node, (*range(rank - 2), *last))
