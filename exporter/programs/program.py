"""A program of torch.export that can be evaluated as a whole, or only as far as some nodes need."""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node
from torch.utils._pytree import tree_leaves, tree_map

from sharp.core.errors import InputError
from sharp.exporter.programs.archive import quiet
from sharp.exporter.programs.flat_graph import calls_flexible, flattened, writes
from sharp.exporter.programs.nodes import contents, name_of, where

MOST_LENGTH = 2**24
OF_ONE_TYPE = (
    *("linear", "addmm", "mm", "matmul", "bmm", "einsum", "conv1d", "conv2d", "convolution"),
    *("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm", "group_norm", "scaled_dot_product_attention"),
)
POSITIONS = (
    "position_ids",
    "positions",
    "input_pos",
    "position",
    "pos",
    "cache_position",
)  # names of inputs that hold positions


@dataclass(frozen=True)
class ProgramInput:
    """An input tensor of the program; a dimension is a number, or the name of a dimension that varies."""

    name: str
    node: Node
    dtype: torch.dtype
    shape: tuple[int | str, ...]

    @property
    def holds_positions(self) -> bool:
        """Whether the input holds the positions 0, 1, 2, ... of each sequence, judged by its name and dtype."""
        return self.name in POSITIONS and not self.dtype.is_floating_point


@dataclass(frozen=True)
class Replacement:
    """A function that is computed in a node's place.

    `compute` gets the values of the nodes `dependencies`, in their order, and returns the value of the node.
    """

    dependencies: tuple[Node, ...]
    compute: Callable[..., Any]


Values = dict[Node, Any]


class Program(nn.Module):
    """The graph of an `ExportedProgram`, its weights and its constants.

    `inputs` are its input tensors, `outputs` the nodes that it returns. `data` are the nodes that depend on the content
    of an input that holds no positions. `tensors` maps the nodes of weights and constants to attributes of this module,
    `names` the names that the user's module gives them. `order` is the index of each node in the graph. `longest` and
    `shortest` are limits of dimensions by name, and `unread` names the parameters that no operator reads.

    Raises:
        InputError: the weights are not float32 or not finite, the program has inputs that are no tensors or whose
            dimensions depend on each other, or it writes into tensors too often.
    """

    def __init__(self, exported: ExportedProgram) -> None:
        super().__init__()
        self.unread = unread_parameters(exported)
        if writes(exported) or calls_flexible(exported):
            with quiet():
                exported = exported.run_decompositions({})  # which removes the operators that write in place
        self.graph, self.attributes = flattened(exported)
        self.tensors: dict[Node, str] = {}  # placeholder -> attribute that holds its tensor
        self.names: dict[str, str] = {}  # name in the module -> attribute
        self.aliases: dict[str, str] = {}  # dimension -> the dimension that always has the same size
        self.inputs: tuple[ProgramInput, ...] = ()
        self._take_inputs(exported)
        specs = exported.graph_signature.output_specs
        returned = next(iter(reversed(self.graph.nodes))).args[0]
        assert isinstance(returned, tuple | list)
        pairs = zip(specs, returned, strict=True)
        self.outputs = [node for spec, node in pairs if spec.kind == OutputKind.USER_OUTPUT and isinstance(node, Node)]
        self.longest = {
            str(symbol): int(limits.upper) if limits.upper.is_Integer else MOST_LENGTH
            for symbol, limits in exported.range_constraints.items()
        }
        self.shortest = {  # a lower limit of 2 only says that the tracer treats 1 as a constant
            str(symbol): int(limits.lower)
            for symbol, limits in exported.range_constraints.items()
            if limits.lower.is_Integer and limits.lower > 2
        }
        self.data = self._after_inputs()
        self.order = {node: index for index, node in enumerate(self.graph.nodes)}

    def _take_inputs(self, exported: ExportedProgram) -> None:
        """Sort the exported program's inputs: user inputs to `inputs`, weights to attributes of this module.

        InputError for any other kind of input, and for weights that are not finite.
        """
        placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        taken: dict[tuple[Any, ...], str] = {}  # a tensor with two names is kept once
        inputs: list[ProgramInput] = []
        for spec, node in zip(exported.graph_signature.input_specs, placeholders, strict=True):
            if spec.kind == InputKind.USER_INPUT:
                value = node.meta.get("val")
                if isinstance(value, Tensor):
                    inputs.append(ProgramInput(node.name, node, value.dtype, _dimensions(node.name, value)))
                elif node.users:
                    raise InputError(f"its input {node.name} is no tensor; fix its value when the program is exported")
                continue
            if spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
                raise InputError(f"its input {node.name} is of kind {spec.kind.name.lower()}, which Sharp cannot lower")
            tensor = exported.state_dict.get(spec.target)
            if tensor is None:
                tensor = exported.constants[spec.target]
            key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
            if key not in taken or not tensor.numel():
                taken[key] = self._keep(str(spec.target), tensor.detach().cpu(), spec.kind == InputKind.PARAMETER)
            self.tensors[node] = self.names[str(spec.target)] = taken[key]
        self.inputs = tuple(self._of_one_batch(port, inputs) for port in inputs)

    def _of_one_batch(self, port: ProgramInput, inputs: list[ProgramInput]) -> ProgramInput:
        """Return an input whose first dimension is named as the batch, for which the tracer may use several names."""
        first, own = inputs[0].shape, port.shape
        if len(own) < 2 or len(first) < 2 or not (isinstance(first[0], str) and isinstance(own[0], str)):
            return port
        if own[0] != first[0]:
            self.aliases[own[0]] = first[0]
        return replace(port, shape=(first[0], *own[1:]))

    def _after_inputs(self) -> set[Node]:
        """Return the nodes that depend on the content of an input that holds no positions, and not only on its size."""
        found = {port.node for port in self.inputs if not port.holds_positions}
        for node in self.graph.nodes:
            if any(operand in found for operand in contents(node)):
                found.add(node)
        return found

    def _keep(self, target: str, tensor: Tensor, parameter: bool) -> str:
        """Register a weight or buffer under an attribute name made of `target`; return it.

        InputError if it is not finite.
        """
        if tensor.is_floating_point():
            if parameter and tensor.dtype != torch.float32:
                dtype = str(tensor.dtype).rpartition(".")[2]
                raise InputError(
                    f"its weights {target} are {dtype}; call float() on the module, --dtype says what is written"
                )
            if parameter and not tensor.isfinite().all():
                raise InputError(f"the weights of {target} are not all finite; train or save the model again")
        name = re.sub(r"\W", "_", target)
        while hasattr(self, name):
            name += "_"
        if parameter:
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        else:
            self.register_buffer(name, tensor)
        return name

    def evaluate(
        self,
        arguments: Mapping[Node, Any],
        targets: Sequence[Node],
        replaced: Mapping[Node, Replacement] | None = None,
        *,
        record: bool = False,
        wide: bool = False,
    ) -> Values:
        """Return the values of `targets` by node, with `arguments` and, with `record`, the values of all nodes between.

        An error of an operator is raised unchanged, with the node's place in the user's module as a note.

        Args:
            arguments: values of inputs, or of any other nodes whose value is already known.
            targets: nodes to compute.
            replaced: what to compute in place of some nodes.
            record: keep intermediate values; otherwise they are None in the result.
            wide: cast to float64 where the graph casts to float32; always done if the weights are float64.

        Raises:
            InputError: `targets` need an input that `arguments` does not have.
        """
        replaced = replaced or {}
        values: Values = dict(arguments)
        needed = self.needed(values, targets, replaced)
        uses: dict[Node, int] = {}
        for node in needed:
            for dependency in self.dependencies(node, replaced):
                uses[dependency] = uses.get(dependency, 0) + 1
        kept = {*targets, *arguments}
        wide = wide or any(tensor.dtype == torch.float64 for tensor in self.parameters())
        for node in needed:
            if node in values:
                continue
            dependencies = self.dependencies(node, replaced)
            if node in replaced:
                values[node] = replaced[node].compute(*(values[dependency] for dependency in dependencies))
            elif node in self.tensors:
                values[node] = getattr(self, self.tensors[node])
            elif node.op == "get_attr":
                values[node] = self.attributes[str(node.target)]
            else:
                try:
                    values[node] = _call(node, values, wide)
                except Exception as error:
                    error.add_note(where(node))  # `read_program` puts it into the message
                    raise
            if record:
                continue
            for dependency in dependencies:
                uses[dependency] -= 1
                if not uses[dependency] and dependency not in kept:
                    values[dependency] = None
        return values

    def needed(self, known: Values, targets: Sequence[Node], replaced: Mapping[Node, Replacement]) -> list[Node]:
        """Return the nodes that must be computed for `targets`, in order, given the values in `known`."""
        found: set[Node] = set()
        waiting = list(targets)
        while waiting:
            node = waiting.pop()
            if node in found or node in known:
                continue
            found.add(node)
            waiting.extend(self.dependencies(node, replaced))
        return sorted(found, key=self.order.__getitem__)

    @staticmethod
    def dependencies(node: Node, replaced: Mapping[Node, Replacement]) -> Sequence[Node]:
        """Return the nodes that a node, or its replacement, is computed from."""
        return replaced[node].dependencies if node in replaced else node.all_input_nodes

    def shape_at(self, node: Node, given: Mapping[Node, Any]) -> tuple[int, ...]:
        """Return the shape of a node's value for the sizes of the inputs in `given`, without evaluating the node.

        `given` must have all inputs.
        """
        sizes = {
            name: size
            for port in self.inputs
            for name, size in zip(port.shape, given[port.node].shape, strict=True)
            if isinstance(name, str)
        }
        sizes |= {name: sizes[same] for name, same in self.aliases.items() if same in sizes}
        found: list[int] = []
        for size in node.meta["val"].shape:
            if isinstance(size, int):
                found.append(size)
            else:
                expression = size.node.expr
                found.append(int(expression.subs({symbol: sizes[str(symbol)] for symbol in expression.free_symbols})))
        return tuple(found)

    def output(self, arguments: Sequence[Tensor], node: Node) -> Tensor:
        """Return the value of `node` by the program's own attention; `arguments` are in the order of `inputs`."""
        given = {port.node: tensor for port, tensor in zip(self.inputs, arguments, strict=True)}
        value: Tensor = self.evaluate(given, [node])[node]
        return value

    def sha256(self) -> str:
        """Return the SHA-256 of the graph and its tensors, in hexadecimal."""
        digest = hashlib.sha256(str(self.graph).encode())
        for name, tensor in sorted((*self.named_parameters(), *self.named_buffers())):
            digest.update(name.encode())
            digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def _call(node: Node, values: Values, wide: bool) -> Any:
    """Call the node's operator with the `values` of its arguments, and return its result.

    With `wide`, constants torch.float32 are float64, for verification.
    """

    def value_of(argument: Any) -> Any:
        """Return an argument with nodes replaced by their values, within lists and dicts too."""
        if isinstance(argument, Node):
            return values[argument]
        if isinstance(argument, list | tuple):
            return type(argument)(value_of(element) for element in argument)
        if isinstance(argument, dict):
            return {name: value_of(element) for name, element in argument.items()}
        if wide and argument is torch.float32:  # keeps float64 as `verification.torch_outputs.in_float64` needs
            return torch.float64
        if isinstance(argument, torch.device):
            return torch.device("cpu")
        return argument

    if node.op != "call_function":
        raise InputError(f"its {where(node)} has no value")
    target: Any = node.target
    if name_of(node) in (
        "view",
        "_unsafe_view",
    ):  # a replaced attention may return another memory layout, which view refuses
        target = torch.ops.aten.reshape.default
    if name_of(node) == "slice_scatter":
        target = _slice_scatter
    if name_of(node) == "copy":
        target = _copy
    arguments, named = value_of(node.args), value_of(node.kwargs)
    if name_of(node) in OF_ONE_TYPE:
        arguments, named = _of_one_type((arguments, named))
    return target(*arguments, **named)


def _of_one_type(arguments: Any) -> Any:
    """Cast all floating-point tensors to one type, which operators such as linear require: to 16 bits, else the widest.

    Types are mixed when weights are in half precision and the graph casts activations to float32, as at its export.
    """
    types = {leaf.dtype for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor) and leaf.is_floating_point()}
    if len(types) < 2:
        return arguments
    narrow = min(types, key=lambda one: one.itemsize)
    dtype = narrow if narrow.itemsize == 2 else max(types, key=lambda one: one.itemsize)

    def cast(one: Any) -> Any:
        """Return a floating-point tensor in the common dtype, anything else unchanged."""
        return one.to(dtype) if isinstance(one, Tensor) and one.is_floating_point() else one

    return tree_map(cast, arguments)


def _copy(tensor: Tensor, source: Tensor, _non_blocking: bool = False) -> Tensor:
    """Compute aten.copy, `source` in the shape and dtype of `tensor`, by operators that have a derivative."""
    return source.to(tensor.dtype).expand(tensor.shape)


def _slice_scatter(
    tensor: Tensor, source: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    """Compute aten.slice_scatter, a copy of `tensor` with `source` in a slice, by a concatenation.

    ONNX Runtime fails on the ONNX form of the operator (onnxscript 0.7: Range and ScatterND). Slices with a step, or
    along a dimension that varies, keep the operator.
    """
    size = tensor.shape[dim]
    if step != 1 or not isinstance(size, int):
        # mypy sees Any, because torch does not type its operators.
        return torch.ops.aten.slice_scatter.default(tensor, source, dim, start, end, step)  # type: ignore[no-any-return]
    first, last, _ = slice(start, end).indices(size)
    last = max(first, last)  # a slice that ends before it begins is empty
    return torch.cat([tensor.narrow(dim, 0, first), source, tensor.narrow(dim, last, size - last)], dim)


def _dimensions(name: str, value: Tensor) -> tuple[int | str, ...]:
    """Return an input's shape: numbers, and names of symbols. InputError for an expression of symbols."""
    found: list[int | str] = []
    for size in value.shape:
        if isinstance(size, int) or size.node.expr.is_Integer:
            found.append(int(size))
        elif re.fullmatch(r"[su]\d+", str(size)):
            found.append(str(size))
        else:
            raise InputError(f"a dimension of its input {name} is {size}; export it with one that varies by itself")
    return tuple(found)


def unread_parameters(program: ExportedProgram) -> tuple[str, ...]:
    """Return the parameters that no operator of a program reads: of a norm, say, where a switch takes another path."""
    read = {node.name for node in program.graph.nodes if node.op == "placeholder" and node.users}
    return tuple(name for node, name in program.graph_signature.inputs_to_parameters.items() if node not in read)
