"""A program that is a decoder: its tokens may be those of one step of many sequences, each at its position."""

import torch
from torch import Tensor
from torch.fx import Node

from sharp.exporter.checkpoints.decoder import Decoder
from sharp.exporter.programs.layers import Attention
from sharp.exporter.programs.nodes import arguments_of, name_of
from sharp.exporter.programs.norm_parameters import NormParameters
from sharp.exporter.programs.positions import PositionTable, after, find_tables
from sharp.exporter.programs.program import Program, Replacement, Values
from sharp.exporter.programs.sizes import Roles, shape_of
from sharp.exporter.programs.token_mixing import check_tokenwise, pass_through
from sharp.exporter.programs.written_out import PRODUCTS
from sharp.models.attention import AttentionFunction
from sharp.models.config import SharpConfig
from sharp.plugins.manifest import PositionScheme

LAST_LINEAR = ("linear", "addmm", "mm", *PRODUCTS)


class ProgramDecoder(Decoder):
    """A program of token ids [batch, tokens] and causal self-attention, seen as every decoder is.

    `own` says that the program itself has the norm of `config`. `tables` are what it reads by position.

    Raises:
        InputError: something but attention mixes tokens, or depends on the length of the sequence.
    """

    def __init__(
        self,
        program: Program,
        roles: Roles,
        attention: Attention,
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
        for number, table in enumerate(tables):  # every layer may read the very same
            same = next(
                (one for one in kept if one.shape == table.values.shape and torch.equal(one, table.values)), None
            )
            if same is None:
                kept.append(table.values)
            self.register_buffer(f"positions_{number}", table.values if same is None else same, persistent=False)
        self.last, self.tail = split(program, output, token_input(program))

    def hidden_states(self, input_ids: Tensor, positions: Tensor, attention: AttentionFunction) -> Tensor:
        """See `Decoder`."""
        given = self.all_inputs(input_ids, positions)
        around = self.parameters_of_norm.around(attention, positions)
        replaced = {
            **self.attention.replacements(around, lambda _layer: None, hidden=self.parameters_of_norm.reads_hidden),
            **self._read_tables(positions, input_ids.shape[0]),
        }
        hidden: Tensor = self.program.evaluate(given, [self.last], replaced)[self.last]
        return hidden

    def all_inputs(self, input_ids: Tensor, positions: Tensor) -> dict[Node, Tensor]:
        """The program's inputs: positions are those of the request, and nothing is padding."""
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
        def reading(number: int, table: PositionTable) -> Replacement:
            def read() -> Tensor:
                values: Tensor = getattr(self, f"positions_{number}")
                if table.learned is not None:
                    values = values.to(getattr(self.program, table.learned).dtype)
                return PositionTable(table.node, table.axis, table.batch_axis, values).at(positions[0], batch)

            return Replacement((), read)

        return {table.node: reading(number, table) for number, table in enumerate(self.tables)}

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Decoder`."""
        if self.last is self.result:
            return hidden
        rows = hidden if hidden.dim() == 3 else hidden[None]
        ids = torch.zeros(rows.shape[:2], dtype=torch.int64)
        values = self.program.evaluate({token_input(self.program): ids, self.tail: rows}, [self.result])
        logits: Tensor = values[self.result]
        return logits if hidden.dim() == 3 else logits[0]

    def own_logits(self, input_ids: Tensor) -> Tensor | None:
        """By the program's own attention; None where it returns the last token's logits only."""
        if not self.own or self.tail is not self.last:
            return None
        positions = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        given = self.all_inputs(input_ids, positions)
        logits: Tensor = self.program.evaluate(given, [self.result])[self.result]
        return logits


def token_input(program: Program) -> Node:
    """The input of token ids."""
    return next(port.node for port in program.inputs if not port.holds_positions and not port.dtype.is_floating_point)


def not_a_decoder(program: Program, roles: Roles, attention: Attention, output: Node) -> str | None:
    """Why a program cannot have a cache, in one sentence; None where it may."""
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
    program: Program, roles: Roles, attention: Attention, output: Node, longest: int
) -> tuple[list[PositionTable], int]:
    """The tables that the decoder reads by position, and the longest sequence that they are for.

    Raises:
        InputError: see `find_tables` and `check_tokenwise`; the latter is a `check` of all that depends on tokens.
    """
    source = token_input(program)
    last, tail = split(program, output, source)

    def given_at(batch: int, length: int) -> Values:
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

    checked = [output if tail is last else last]  # what follows the last token's state has no row for the others

    def run(tokens: Tensor) -> Values:
        given = {**given_at(1, tokens.shape[1]), source: tokens}
        return program.evaluate(given, checked, replaced, record=True)

    needed = program.needed({}, checked, replaced)
    nodes = [node for node in needed if node in of_tokens and node is not source]
    check_tokenwise(run, nodes, roles.vocabularies[source.name])
    return tables, longest


def split(program: Program, output: Node, source: Node) -> tuple[Node, Node]:
    """The node of the hidden states, and the one that the logits of some rows of them are computed from.

    They differ where the program takes the last token's hidden state only. Both are the output where no product is at
    the end, or where its input is no [batch, tokens, size].
    """
    of_tokens = after(program, source)
    ids = source.meta["val"].shape
    node, passed = output, False
    while True:
        before = [one for one in node.all_input_nodes if one in of_tokens and isinstance(one.meta.get("val"), Tensor)]
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
    if name_of(node) == "slice":
        arguments = arguments_of(node)
        return (arguments["dim"], arguments["start"]) == (1, -1)
    return name_of(node) == "index" and len(node.args[1]) == 2 and node.args[1][0] is None  # type: ignore[arg-type, index]  # a list
