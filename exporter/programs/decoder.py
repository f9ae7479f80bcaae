"""A program that is a decoder. Its input may be the tokens of one step of many sequences, each at its own position."""

import torch
from torch import Tensor
from torch.fx import Node

from sharp.core.manifest import PositionScheme
from sharp.exporter.programs.layers import AttentionLayers
from sharp.exporter.programs.nodes import arguments_of, name_of
from sharp.exporter.programs.norm_parameters import NormParameters
from sharp.exporter.programs.positions import PositionTable, after, find_tables
from sharp.exporter.programs.program import Program, Replacement, Values
from sharp.exporter.programs.sizes import Roles, shape_of
from sharp.exporter.programs.token_mixing import check_tokenwise, pass_through
from sharp.exporter.programs.written_out import PRODUCTS
from sharp.exporter.sources.decoder import Decoder
from sharp.models.attention import AttentionFunction
from sharp.models.config import SharpConfig

LAST_LINEAR = ("linear", "addmm", "mm", *PRODUCTS)


class ProgramDecoder(Decoder):
    """A program of token ids [batch, tokens] and causal self-attention, with the interface of `Decoder`.

    `own` says that the program itself has the norm of `config`. `output` is the node of the logits. `tables` are the
    values that the program reads by position, from `find_positions`. Make a decoder only of a program for which
    `not_a_decoder` returns None.
    """

    def __init__(
        self,
        program: Program,
        roles: Roles,
        attention: AttentionLayers,
        output: Node,
        config: SharpConfig,
        parameters: NormParameters,
        tables: list[PositionTable],
        *,
        own: bool,
    ) -> None:
        super().__init__()
        self.program = program
        self.roles = roles
        self.attention = attention
        self.result = output
        self.config = config
        self.norm_name = config.norm
        self.parameters_of_norm = parameters
        self.own = own
        self.routed = any(name_of(node) == "topk" for node in program.data)
        self.positions: PositionScheme = "learned" if tables else "none"
        if not tables and attention.first.logits.slopes is not None:
            self.positions = "alibi"
        self.tables = tables
        kept: list[Tensor] = []
        for number, table in enumerate(tables):  # every layer may read an equal table, which is kept once
            same = next(
                (values for values in kept if values.shape == table.values.shape and torch.equal(values, table.values)),
                None,
            )
            if same is None:
                kept.append(table.values)
            self.register_buffer(f"positions_{number}", table.values if same is None else same, persistent=False)
        self.last, self.tail = split(program, output, token_input(program))

    def hidden_states(self, input_ids: Tensor, positions: Tensor, attention: AttentionFunction) -> Tensor:
        """Return the hidden states before the last linear layer, computed with `attention` and the chosen norm.

        `input_ids` and `positions` are int64 [batch, tokens], and all sequences must have the positions of the first.
        If the program does not end in a linear layer, the result is its logits.
        """
        given = self.all_inputs(input_ids, positions)
        around = self.parameters_of_norm.around(attention, positions)
        replaced = {
            **self.attention.replacements(around, lambda _layer: None, hidden=self.parameters_of_norm.reads_hidden),
            **self._read_tables(positions, input_ids.shape[0]),
        }
        hidden: Tensor = self.program.evaluate(given, [self.last], replaced)[self.last]
        return hidden

    def all_inputs(self, input_ids: Tensor, positions: Tensor) -> dict[Node, Tensor]:
        """Return the program's inputs for these tokens: `positions` where it takes positions, masks without padding.

        `input_ids` and `positions` are [batch, tokens]. An input of positions without a batch gets those of the first
        sequence.
        """
        found: dict[Node, Tensor] = {token_input(self.program): input_ids}
        for port in self.program.inputs:
            if port.holds_positions:
                value = positions if len(port.shape) == 2 else positions[0]
                found[port.node] = value.to(port.dtype)
            elif port.name in self.roles.visible:
                shape = input_ids.shape if len(port.shape) == 2 else (input_ids.shape[0], 1, 1, input_ids.shape[1])
                found[port.node] = torch.full(shape, self.roles.visible[port.name]).to(port.dtype)
        return found

    def _read_tables(self, positions: Tensor, batch: int) -> dict[Node, Replacement]:
        """Return replacements of the nodes that read position tables: rows at `positions` [batch, tokens] instead."""

        def reading(number: int, table: PositionTable) -> Replacement:
            """Return the replacement of a table's node: rows of table `number` at the positions."""

            def read() -> Tensor:
                """Return the table's rows at the positions, in the layout of its node."""
                values: Tensor = getattr(self, f"positions_{number}")
                if table.learned is not None:
                    values = values.to(getattr(self.program, table.learned).dtype)
                return PositionTable(table.node, table.axis, table.batch_axis, values).at(positions[0], batch)

            return Replacement((), read)

        return {table.node: reading(number, table) for number, table in enumerate(self.tables)}

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [..., vocab] from what `hidden_states` returns, by the nodes of the program that follow.

        `hidden` is [batch, tokens, hidden] or [tokens, hidden].
        """
        if self.last is self.result:
            return hidden
        rows = hidden if hidden.dim() == 3 else hidden[None]
        ids = torch.zeros(rows.shape[:2], dtype=torch.int64)
        values = self.program.evaluate({token_input(self.program): ids, self.tail: rows}, [self.result])
        logits: Tensor = values[self.result]
        return logits if hidden.dim() == 3 else logits[0]

    def own_logits(self, input_ids: Tensor) -> Tensor | None:
        """Return the logits [batch, tokens, vocab] by the program's own attention, for positions from 0.

        None if the program has another norm than `config`, or returns the logits of the last token only.
        """
        if not self.own or self.tail is not self.last:
            return None
        positions = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        given = self.all_inputs(input_ids, positions)
        logits: Tensor = self.program.evaluate(given, [self.result])[self.result]
        return logits


def token_input(program: Program) -> Node:
    """Return the first input of integers that holds no positions: the token ids. The program must have one."""
    return next(port.node for port in program.inputs if not port.holds_positions and not port.dtype.is_floating_point)


def not_a_decoder(program: Program, roles: Roles, attention: AttentionLayers, output: Node) -> str | None:
    """Return one sentence that says why a program cannot have a cache; None if it can."""
    tokens = [port for port in program.inputs if port.name in roles.vocabularies and not port.holds_positions]
    others = [
        port.name
        for port in program.inputs
        if port not in tokens and not port.holds_positions and port.name not in roles.visible
    ]
    if len(tokens) != 1 or tokens[0].node is not token_input(program) or len(tokens[0].shape) != 2:
        return "it does not take token ids of shape [batch, tokens] as its first input of integers"
    if others:
        return f"it takes {others[0]} besides token ids"
    if roles.length is None or tokens[0].shape[1] != roles.length:
        return (
            "its number of tokens is fixed, by its dynamic_shapes or by its code (a loop over tokens, a tensor that it "
            "keeps of their size)"
        )
    if isinstance(tokens[0].shape[0], int) and tokens[0].shape[0] != 1:
        return f"its batch is fixed at {tokens[0].shape[0]}; export it with one that varies (torch.export.Dim.AUTO)"
    for layer in attention.layers:
        if not (layer.own and layer.logits.causal):
            kind = "is not causal" if layer.own else "is over other tokens than its queries"
            return f"attention at {layer.call.where} {kind}"
        if layer.folded:
            return (
                f"attention at {layer.call.where} has something in its batch besides the sequences, and Sharp knows "
                "heads there as batch * heads only; give it queries, keys and values of [batch, heads, tokens, dim]"
            )
    if output.meta["val"].dim() != 3 or not isinstance(output.meta["val"].shape[2], int):
        return "it does not return logits of shape [batch, tokens, vocabulary]"
    return None


def find_positions(
    program: Program, roles: Roles, attention: AttentionLayers, output: Node, longest: int
) -> tuple[list[PositionTable], int]:
    """Return the tables that the decoder reads by position, and the longest sequence that they are for.

    Args:
        program: the program.
        roles: the roles of its inputs, with the masks.
        attention: its attention.
        output: the node of the logits.
        longest: the number of tokens up to which tables are of use, the upper limit of the result.

    Raises:
        InputError: a value depends on the length of the sequence, or something but attention mixes tokens.
    """
    source = token_input(program)
    last, tail = split(program, output, source)

    def given_at(batch: int, length: int) -> Values:
        """Return inputs for `batch` sequences of `length` tokens: positions in order, and all tokens equal."""
        given: Values = {}
        for port in program.inputs:
            shape = shape_of(program, roles, port, batch, length)
            if port.holds_positions:
                given[port.node] = torch.arange(shape[-1]).expand(shape).to(port.dtype)
            else:
                given[port.node] = torch.full(shape, roles.visible.get(port.name, 0)).to(port.dtype)
        return given

    replaced = attention.replacements(pass_through, lambda _layer: None)
    needed = program.needed({}, [last], replaced)
    of_tokens = after(program, source)
    tables, longest = find_tables(program, given_at, needed, of_tokens, replaced, longest)

    checked = [output if tail is last else last]  # the logits of the last token alone have no rows for the other tokens

    def run(tokens: Tensor) -> Values:
        """Return the values of the nodes to be checked for these tokens [1, length]."""
        given = {**given_at(1, tokens.shape[1]), source: tokens}
        return program.evaluate(given, checked, replaced, record=True)

    needed = program.needed({}, checked, replaced)
    nodes = [node for node in needed if node in of_tokens and node is not source]
    check_tokenwise(run, nodes, roles.vocabularies[source.name])
    return tables, longest


def split(program: Program, output: Node, source: Node) -> tuple[Node, Node]:
    """Return the node of the hidden states, and the node that the logits of some of their rows are computed from.

    The two nodes differ if the program computes logits of the last token only. Both are `output` if the program does
    not end in a matrix product, or if the input of that product is not of shape [batch, tokens, size].
    """
    of_tokens = after(program, source)
    ids = source.meta["val"].shape
    node, passed = output, False
    while True:
        before = [
            operand
            for operand in node.all_input_nodes
            if operand in of_tokens and isinstance(operand.meta.get("val"), Tensor)
        ]
        if len(before) != 1 or node is source:
            return output, output
        passed = passed or name_of(node) in LAST_LINEAR
        shape = before[0].meta["val"].shape
        if passed and len(shape) == 3 and shape[:2] == ids:
            if node.meta["val"].shape[1] == ids[1]:
                return before[0], before[0]
            return (before[0], node) if _takes_last(node) else (output, output)
        if passed and not (len(shape) == 3 and shape[0] == ids[0] and shape[1] == 1):
            return output, output
        node = before[0]


def _takes_last(node: Node) -> bool:
    """Whether the node keeps the last token only, by a slice or an index of the second dimension."""
    if name_of(node) == "slice":
        arguments = arguments_of(node)
        return (arguments["dim"], arguments["start"]) == (1, -1)
    return name_of(node) == "index" and len(node.args[1]) == 2 and node.args[1][0] is None  # type: ignore[arg-type, index]  # of a list
