"""Inputs of a program for a batch and a length, with which the program is evaluated, traced and compared."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.fx import Node

from sharp.exporter.programs.nodes import arguments_of, name_of
from sharp.exporter.programs.program import Program, ProgramInput

LOOKED_THROUGH = ("view", "reshape", "to", "_to_copy", "clone", "contiguous", "unsqueeze", "clamp", "slice")


@dataclass(frozen=True)
class Roles:
    """The roles of a program's inputs and of their dimensions.

    `batch` and `length` are the names of these two dimensions, None if they are fixed. `visible` maps the name of every
    input that is a mask to the value that marks visible keys. `vocabularies` maps the names of the inputs of integers
    that index an embedding to the number of valid ids.
    """

    batch: str | None
    length: str | None
    vocabularies: Mapping[str, int]
    visible: Mapping[str, float]

    def with_masks(self, visible: Mapping[str, float]) -> "Roles":
        """Return these roles with more masks: by input name, the number that marks visible tokens."""
        return replace(self, visible={**self.visible, **visible})


def roles_of(program: Program) -> Roles:
    """Return the roles that follow from the inputs alone, without masks, which `find_layers` adds.

    The batch is the first dimension of the first input, the length the next dimension of the inputs that varies. If the
    first input has one dimension, this is the length, and there is no batch.
    """
    names = [dimension for port in program.inputs for dimension in port.shape if isinstance(dimension, str)]
    first = program.inputs[0].shape if program.inputs else ()
    batch = first[0] if first and isinstance(first[0], str) else None
    length = next((name for name in names if name != batch), None)
    if len(first) < 2 or (batch is not None and length is None and len(first) == 1):
        batch, length = None, batch
    return Roles(
        batch=batch,
        length=length,
        vocabularies={
            port.name: size
            for port in program.inputs
            if not port.dtype.is_floating_point and (size := _vocabulary(port.node)) is not None
        },
        visible={},
    )


def shape_of(program: Program, roles: Roles, port: ProgramInput, batch: int, length: int) -> tuple[int, ...]:
    """Return the shape of an input for a batch and a length, within the limits that the program sets.

    Other dimensions that vary are a little longer than the length.
    """
    sizes: list[int] = []
    others = [name for other in program.inputs for name in other.shape if name not in (roles.batch, roles.length)]
    for dimension in port.shape:
        if isinstance(dimension, int):
            sizes.append(dimension)
        elif dimension == roles.batch:
            sizes.append(min(max(batch, program.shortest.get(dimension, 0)), program.longest.get(dimension, batch)))
        else:
            size = length if dimension == roles.length else length + 1 + others.index(dimension) % 3
            sizes.append(min(max(size, program.shortest.get(dimension, 0)), program.longest.get(dimension, size)))
    return tuple(sizes)


def random_inputs(
    program: Program, roles: Roles, batch: int, length: int, generator: torch.Generator, *, padded: bool = False
) -> tuple[Tensor, ...]:
    """Return random inputs in the order of `program.inputs`, of the shapes of `shape_of`.

    Floats are normally distributed, integers valid ids, positions 0, 1, 2, ... Masks make all keys visible. With
    `padded`, they hide the keys after a random length in all sequences but the first.
    """
    made: list[Tensor] = []
    for port in program.inputs:
        shape = shape_of(program, roles, port, batch, length)
        if port.holds_positions:
            tensor = torch.arange(shape[-1]).expand(shape).to(port.dtype).clone()
        elif port.name in roles.visible:
            seen = torch.ones(shape, dtype=torch.bool)
            if padded:
                lengths = torch.randint(1, shape[-1] + 1, (shape[0],), generator=generator)
                lengths[0] = shape[-1]
                seen = (torch.arange(shape[-1]) < lengths.view(-1, *(1,) * (len(shape) - 1))).expand(shape)
            visible = roles.visible[port.name]
            hidden = -torch.inf if port.dtype.is_floating_point and visible == 0 else 1 - visible
            tensor = torch.where(seen, visible, hidden).to(port.dtype)
        elif port.dtype.is_floating_point:
            tensor = torch.randn(shape, generator=generator).to(port.dtype)
        else:
            most = 2 if port.dtype == torch.bool else roles.vocabularies.get(port.name, 2)
            tensor = torch.randint(most, shape, generator=generator).to(port.dtype)
        made.append(tensor)
    return tuple(made)


def _vocabulary(node: Node) -> int | None:
    """Return the number of rows of the smallest embedding that an input indexes; None if it indexes none."""
    found: list[int] = []
    waiting = [node]
    while waiting:
        one = waiting.pop()
        for user in one.users:
            if name_of(user) == "embedding" and arguments_of(user)["indices"] is one:
                found.append(int(arguments_of(user)["weight"].meta["val"].shape[0]))
            elif name_of(user) in LOOKED_THROUGH:
                waiting.append(user)
    return min(found, default=None)
