"""Programs over whole sequences: any module, with its attention replaced (`--cache none`)."""

from typing import Literal

import torch
from torch import Tensor
from torch.fx import Node

from sharp.core.errors import InputError
from sharp.core.manifest import ModelKind, Port, PositionScheme
from sharp.exporter.programs.layers import AttentionLayers, Layer
from sharp.exporter.programs.norm_parameters import NormParameters
from sharp.exporter.programs.program import Program
from sharp.exporter.programs.sizes import Roles, random_inputs
from sharp.exporter.sources.uncached_model import UncachedModel
from sharp.models.attention import AttentionFunction, EagerAttention
from sharp.models.config import SharpConfig

Dtype = Literal["float32", "int64", "int32", "bool"]
DTYPES: dict[torch.dtype, Dtype] = {
    torch.float32: "float32",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.bool: "bool",
}


class ProgramModel(UncachedModel):
    """A program, the node of its output, and the norm that its attention is to have.

    `own` says that the program itself has that norm, so its own output can be compared with this model's.

    Raises:
        InputError: an input of the program has another type than float32, int64, int32 or bool.
    """

    kind: ModelKind = "module"
    positions: PositionScheme = "none"

    def __init__(
        self,
        program: Program,
        roles: Roles,
        attention: AttentionLayers,
        output: Node,
        config: SharpConfig,
        parameters: NormParameters,
        *,
        own: bool,
    ) -> None:
        super().__init__()
        self.program = program
        self.roles = roles
        self.attention = attention
        self.result = output
        self.config = config
        self.parameters_of_norm = parameters
        self.own = own
        for port in program.inputs:
            if port.dtype not in DTYPES:
                raise InputError(f"its input {port.name} is {port.dtype}; take float32, int64, int32 or bool")
        self.inputs = tuple(
            Port(
                name=port.name,
                dtype=DTYPES[port.dtype],
                shape=tuple(map(self._dimension, port.shape)),
                doc=self._doc(port.name),
            )
            for port in program.inputs
        )
        shape = output.meta["val"].shape
        sizes = tuple(size if isinstance(size, int) else self._dimension(str(size)) for size in shape)
        self.output = Port(name="output", dtype="float32", shape=sizes, doc="what the module returns")
        queries = [layer.call.query for layer in attention.layers]
        shapes = [query.arrange(query.node.meta["val"]).shape for query in queries]
        self._rows = tuple(
            (str(shape[0]), str(shape[2])) for shape in shapes
        )  # names of the dimensions of sequences and queries of every layer

    @property
    def queries(self) -> int | str:
        """The queries of every layer, as a number or the name of a dimension; "queries" if layers differ."""
        sizes = {queries for _, queries in self._rows}
        if len(sizes) > 1:
            return "queries"
        first = sizes.pop()
        return int(first) if first.isdecimal() else self._dimension(first)

    def stack(self, rows: list[Tensor]) -> Tensor:
        """Stack the rows of all layers, each [batch, q_heads, queries, ...], behind one another along a new first axis.

        Rows with fewer sequences or queries than those of other layers are padded with zeros.

        Encoder and decoder layers differ in their number of queries, axial layers in their number of sequences.
        """
        for axis, names in zip((0, 2), zip(*self._rows, strict=True), strict=True):
            sizes = {name: row.shape[axis] for name, row in zip(names, rows, strict=True)}
            rows = [
                _padded(row, axis, [sizes[other] for other in sizes if other != name])
                for name, row in zip(names, rows, strict=True)
            ]
        return torch.stack(rows)

    def _dimension(self, size: int | str) -> int | str:
        """Return "batch", "length" or another name for a symbol of the program; a number stays."""
        if isinstance(size, int):
            return size
        names = {self.roles.batch: "batch", self.roles.length: "length"}
        return names.get(size, size if size.isidentifier() else "size")

    def _doc(self, name: str) -> str:
        """Return the manifest's description of the input `name`."""
        if name in self.roles.visible:
            return f"{self.roles.visible[name]:g} at what counts, then padding behind it"
        return "an input of the module"

    def compute(self, attention: AttentionFunction, *inputs: Tensor, only: int | None = None) -> Tensor:
        """Compute the output with `attention` in every layer, or in the layer of number `only` (from 0) alone.

        `inputs` are in the order of the port list `inputs`. The other layers then keep the program's own attention.
        """
        given = {port.node: tensor for port, tensor in zip(self.program.inputs, inputs, strict=True)}

        def lengths(layer: Layer) -> Tensor | None:
            """Return the numbers of visible tokens [batch] by the layer's mask inputs; None without masks."""
            masks = layer.logits.masks
            if not masks:
                return None
            seen = given[masks[0].node] == self.roles.visible[masks[0].name]
            for port in masks[1:]:
                seen = seen & (given[port.node] == self.roles.visible[port.name])
            return seen.flatten(1).sum(-1)  # [batch]

        parameters = self.parameters_of_norm
        replaced = self.attention.replacements(parameters.around(attention), lengths, hidden=parameters.reads_hidden)
        if only is not None:
            result = self.attention.layers[only].call.result
            replaced = {result: replaced[result]}
        output: Tensor = self.program.evaluate(given, [self.result], replaced)[self.result]
        return output

    def own_output(self, *inputs: Tensor) -> Tensor | None:
        """Return the output by the program's own attention; None if the program has another norm."""
        return self.program.output(inputs, self.result) if self.own else None

    def eager(self, *inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the output in PyTorch, and the attention weights of every layer [batch, q_heads, queries, keys].

        The output is that of the program's own attention if it has the norm. It is float32, or float64 if the model
        computes in float64.
        """
        attention = EagerAttention(self.config, record=True)
        computed = self.compute(attention, *inputs)
        own = self.own_output(*inputs)
        return (computed if own is None else own).float() if computed.dtype != torch.float64 else (
            computed if own is None else own
        ), attention.weights

    def random_inputs(self, batch: int, length: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Return random inputs in the order of `inputs`, with padding of random length in all sequences but the first.

        A dimension that the program limits or fixes may be another than `batch` or `length`.
        """
        return random_inputs(self.program, self.roles, batch, length, generator, padded=True)


def _padded(rows: Tensor, axis: int, sizes: list[int]) -> Tensor:
    """Append zeros to `rows` along `axis`, of each of `sizes` in order."""
    zeros = [rows.new_zeros(*rows.shape[:axis], size, *rows.shape[axis + 1 :]) for size in sizes]
    return torch.cat([rows, *zeros], dim=axis) if zeros else rows
