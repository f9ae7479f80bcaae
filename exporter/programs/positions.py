"""Tables of the values that depend on a token's position, which cached forms read at the positions of the request.

A value that follows from sizes, weights and positions alone is a function of the position if the value for a short
sequence is the beginning of the value for a long sequence. Such a value is computed once, for the longest sequence.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from sharp.core.errors import InputError
from sharp.exporter.programs.nodes import ancestors, contents, where
from sharp.exporter.programs.program import Program, Replacement

SHORT, LONG = 7, 12


@dataclass(frozen=True)
class PositionTable:
    """A node's value for all positions, along `axis`; along `batch_axis` it is equal for all sequences.

    `learned` names the parameter that the value is computed from. The value has the dtype of that parameter; a value
    without a parameter, such as the angles of RoPE, keeps its own dtype.
    """

    node: Node
    axis: int
    batch_axis: int | None
    values: Tensor
    learned: str | None = None

    def at(self, positions: Tensor, batch: int) -> Tensor:
        """Return the value at `positions` int64 [tokens], for a batch of that size."""
        found = torch.index_select(self.values, self.axis, positions)
        if self.batch_axis is None:
            return found
        return found.expand(*(batch if axis == self.batch_axis else -1 for axis in range(found.dim())))


def after(program: Program, source: Node) -> set[Node]:
    """Return the nodes that depend on the content of `source`, with `source` itself."""
    found = {source}
    for node in program.graph.nodes:
        if any(operand in found for operand in contents(node)):
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
    """Return the tables that `needed` nodes read, and the longest sequence that they can be made for, up to `longest`.

    Args:
        program: the program.
        given_at: gets a batch and a length, and returns the program's inputs by node.
        needed: nodes that compute the output, with attention replaced.
        of_tokens: nodes that depend on the token ids.
        replaced: what is computed in place of attention.
        longest: the number of tokens up to which tables are of use.

    Raises:
        InputError: something depends on the length of the sequence.
    """
    read: list[Node] = []
    for node in needed:
        if node not in of_tokens and isinstance(node.meta.get("val"), Tensor) and node not in program.tensors:
            users = [user for user in needed if node in program.dependencies(user, replaced)]
            if any(user in of_tokens for user in users):
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
    """Return the name of the trained parameter that the node is computed from (the first by name), or None."""
    names = sorted(
        program.tensors[source] for source in ancestors(node, through_sizes=False) if source in program.tensors
    )
    return next((name for name in names if isinstance(getattr(program, name), nn.Parameter)), None)


def _axes(node: Node, short: Tensor, long: Tensor) -> tuple[int, int | None] | None:
    """Return the axes of tokens and of the batch; None if the value is the same for every token.

    Raises:
        InputError: the value depends on the length of the sequence or on the sequence, or is of all pairs of tokens.
    """
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
        (other for other, size in enumerate(node.meta["val"].shape) if other != axis and not isinstance(size, int)),
        None,
    )
    if batch_axis is not None and not torch.equal(short, short.narrow(batch_axis, 0, 1).expand_as(short)):
        raise InputError(f"{where(node)} differs between sequences that have the same positions")
    return axis, batch_axis


def longest_sequence(program: Program, given_at: Any, nodes: list[Node], most: int) -> int:
    """Return the longest sequence, up to `most`, at which all `nodes` can be evaluated.

    A table of learned positions limits the length. `given_at` gets a batch and a length, and returns the program's
    inputs by node. Lengths up to 12 are not tried unless `most` is one.
    """

    def works(length: int) -> bool:
        """Whether the program runs at `length` tokens and its nodes then have that size."""
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
