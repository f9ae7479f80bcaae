"""What depends on a token's position: tables that the cached forms read at the positions of the request.

A value that follows from sizes, weights and inputs of positions alone is a function of the position if the value of a
short sequence is the beginning of that of a long one. Then it is computed once, for the longest sequence, and read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from sharp.exporter.programs.nodes import ancestors, contents, where
from sharp.exporter.programs.program import Program, Replacement
from sharp.plugins.errors import InputError

SHORT, LONG = 7, 12


@dataclass(frozen=True)
class PositionTable:
    """A node's value for all positions; its tokens are along `axis`, and along `batch_axis` all sequences are alike.

    `learned` names the parameter that it is made of: where that is in half precision, so is the value. Angles are not.
    """

    node: Node
    axis: int
    batch_axis: int | None
    values: Tensor
    learned: str | None = None

    def at(self, positions: Tensor, batch: int) -> Tensor:
        """The value at positions int64 [tokens]."""
        found = torch.index_select(self.values, self.axis, positions)
        if self.batch_axis is None:
            return found
        return found.expand(*(batch if axis == self.batch_axis else -1 for axis in range(found.dim())))


def after(program: Program, source: Node) -> set[Node]:
    """What depends on what is in `source`."""
    found = {source}
    for node in program.graph.nodes:
        if any(one in found for one in contents(node)):
            found.add(node)
    return found


def find_tables(
    program: Program,
    given_at: Any,
    needed: list[Node],
    of_tokens: set[Node],
    replaced: Mapping[Node, Replacement],
    longest: int,
) -> tuple[list[PositionTable], int]:
    """The tables that `needed` nodes read, and the longest sequence that they can be made for, up to `longest`.

    Args:
        program: the program.
        given_at: what makes the program's inputs for a batch and a length.
        needed: nodes that compute the output, with attention replaced.
        of_tokens: those that depend on what the tokens are.
        replaced: the attention.
        longest: tokens of the longest sequence that is of use.

    Raises:
        InputError: something depends on the length of the sequence.
    """
    read: list[Node] = []
    for node in needed:
        if node not in of_tokens and isinstance(node.meta.get("val"), Tensor) and node not in program.tensors:
            users = [one for one in needed if node in program.dependencies(one, replaced)]
            if any(one in of_tokens for one in users):
                read.append(node)
    one, two = (program.evaluate(given_at(2, length), read) for length in (SHORT, LONG))
    varying: list[tuple[Node, int, int | None]] = []
    for node in read:
        found = _axes(node, one[node], two[node])
        if found is not None:
            varying.append((node, *found))
    nodes = [node for node, _, _ in varying]
    longest = longest_sequence(program, given_at, nodes, longest)
    values = program.evaluate(given_at(1, longest), nodes)
    tables = [
        PositionTable(node, axis, batch_axis, values[node].contiguous(), _parameter_of(program, node))
        for node, axis, batch_axis in varying
    ]
    return tables, longest


def _parameter_of(program: Program, node: Node) -> str | None:
    names = sorted(program.tensors[one] for one in ancestors(node, through_sizes=False) if one in program.tensors)
    return next((one for one in names if isinstance(getattr(program, one), nn.Parameter)), None)


def _axes(node: Node, short: Tensor, long: Tensor) -> tuple[int, int | None] | None:
    """The axes of tokens and of the batch; None where the value is the same for every token."""
    changed = [axis for axis in range(short.dim()) if short.shape[axis] != long.shape[axis]]
    if not changed:
        if torch.equal(short, long):
            return None
        raise InputError(f"{where(node)} depends on the length of the sequence, which a cache does not know")
    if len(changed) > 1:
        raise InputError(f"{where(node)} is of all pairs of tokens, outside of an attention that Sharp recognises")
    axis = changed[0]
    if (short.shape[axis], long.shape[axis]) != (SHORT, LONG):
        raise InputError(f"{where(node)} is not of one value for every token")
    if torch.equal(long, long.narrow(axis, 0, 1).expand_as(long)) and torch.equal(
        short, long.narrow(axis, 0, 1).expand_as(short)
    ):
        return None
    beginning = long.narrow(axis, 0, SHORT)
    if not torch.allclose(beginning.double(), short.double(), rtol=1e-5, atol=1e-6, equal_nan=True):
        raise InputError(f"{where(node)} depends on the length of the sequence, which a cache does not know")
    batch_axis = next(
        (one for one, size in enumerate(node.meta["val"].shape) if one != axis and not isinstance(size, int)), None
    )
    if batch_axis is not None and not torch.equal(short, short.narrow(batch_axis, 0, 1).expand_as(short)):
        raise InputError(f"{where(node)} differs between sequences that have the same positions")
    return axis, batch_axis


def longest_sequence(program: Program, given_at: Any, nodes: list[Node], most: int) -> int:
    """The longest sequence that all tables can be made for: a table of learned positions ends somewhere."""

    def works(length: int) -> bool:
        try:
            values = program.evaluate(given_at(1, length), nodes)
        except (RuntimeError, IndexError):
            return False
        return all(length in values[node].shape for node in nodes)

    if works(most):
        return most
    low, high = LONG, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if works(middle) else (low, middle)
    return low
