"""The ops as model-local functions of standard ONNX ops, attached to a model for runtimes that lack our kernels."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx
from onnx import TensorProto, helper

from sharp.core.errors import InputError
from sharp.plugins.op.attention_body import write_attention
from sharp.plugins.op.attributes import check_attributes, head_params_mistake
from sharp.plugins.op.node_list import NodeList
from sharp.plugins.op.paged_body import write_paged_attention
from sharp.plugins.op.schema import (
    ABSENT,
    ATTENTION,
    DEFAULT_STATS_COLUMNS,
    DOMAIN,
    ICML2025_COEFFICIENTS,
    OLD_ATTENTION,
    PAGED_ATTENTION,
    REQUIRED_ATTRIBUTES,
    VERSION,
    OpDefinition,
    attribute_defaults,
)

BODIES: dict[str, tuple[OpDefinition, Callable[[NodeList, str, frozenset[str], tuple[float, ...], int], None]]] = {
    PAGED_ATTENTION.name: (PAGED_ATTENTION, write_paged_attention),
    ATTENTION.name: (ATTENTION, write_attention),
    OLD_ATTENTION.name: (OLD_ATTENTION, write_attention),
}


@dataclass(frozen=True, order=True)
class FunctionForm:
    """The form of one function. Forms differ, because a body cannot branch on a string or on an absent input.

    `op` is a key of `BODIES`; `given` names the optional inputs that nodes have; `coefficients` are those of
    adaptive_softmax, otherwise empty.
    """

    op: str
    normalizer: str
    given: tuple[str, ...]
    coefficients: tuple[float, ...] = ()
    stats_columns: int = DEFAULT_STATS_COLUMNS

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the function's outputs: the op's, then updated cache tensors if the nodes have a key screen."""
        definition, _ = BODIES[self.op]
        beside = definition.beside if "key_screen" in self.given else ()
        return (*definition.output_names, *(f"{parameter.name}_out" for parameter in beside))

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the op's inputs up to the last that is given, and at least all required inputs.

        Optional inputs before the last given one are included, because TensorRT requires a value for each of them.
        """
        definition, _ = BODIES[self.op]
        names = definition.all_input_names
        last = max((names.index(name) + 1 for name in self.given), default=0)
        return names[: max(last, definition.required_inputs)]


def make_function(form: FunctionForm, opset: int = 23, overload: str = "") -> onnx.FunctionProto:
    """Return the function for nodes of `form`; the op's attributes become attributes of the function.

    `opset` is the version of ONNX's own ops in the function, and must be that of the model. `overload` distinguishes
    the functions of one op in a model.

    Raises:
        InputError: the normalizer is unknown or lacks its parameters, stats_columns is neither 4 nor 5, inputs that
            belong together are not given together, or the body of a user's normalizer fails.
    """
    given = frozenset(form.given)
    check_attributes({"normalizer": form.normalizer, "stats_columns": form.stats_columns})
    if "head_params" not in given and (mistake := head_params_mistake(form.normalizer, None)) is not None:
        raise InputError(mistake)
    if ("past_key" in given) != ("past_value" in given) or ("past_lens" in given and "past_key" not in given):
        raise InputError("past_key and past_value must be given together, and past_lens only with them")
    definition, write_body = BODIES[form.op]
    nodes = NodeList()
    write_body(nodes, form.normalizer, given, form.coefficients or ICML2025_COEFFICIENTS, form.stats_columns)
    # The body reads all keys, so it passes a key screen through unchanged.
    for name in form.outputs[len(definition.output_names) :]:
        nodes.op("Identity", name.removesuffix("_out"), name=name)
    return helper.make_function(
        DOMAIN,
        form.op,
        list(form.inputs),
        list(form.outputs),
        nodes.leading_to(form.outputs),
        [helper.make_opsetid("", opset)],
        attributes=list(REQUIRED_ATTRIBUTES),
        attribute_protos=attribute_defaults(),
        overload=overload,
    )


def attach_function(model: onnx.ModelProto) -> None:
    """Add to `model` the functions that its `ai.sharp` nodes need, and replace older versions of these functions.

    Nodes of one op that differ in normalizer, coefficients, columns of `stats` or optional inputs call overloads of the
    op's function. Attach functions to the finished model only, because optimizers and version converters inline them.
    Nodes with scales (int8 and fp8 caches) get no function, and a model that has no other nodes is left as it is. The
    model is changed in place.

    The nodes are completed for readers that do less than ONNX Runtime. Neither onnx's inliner nor TensorRT's parser
    applies the defaults that a function declares, so attributes that a node leaves out are written onto the node.
    TensorRT refuses a function call with an empty input, so an optional input that is left out before one that is given
    becomes an empty tensor.

    Raises:
        InputError: the model has no node of the domain `ai.sharp`, or a node's attributes or inputs are not valid.
    """
    ours = [node for node in model.graph.node if node.domain == DOMAIN and node.op_type in BODIES]
    # Nodes with scales (int8 and fp8 caches) get no function: only kernels can read scaled caches.
    nodes = [node for node in ours if not {"key_scale", "value_scale"} & {*given_inputs(node)}]
    if ours and not nodes:
        return
    forms = sorted({_form(node) for node in nodes})
    ops = [form.op for form in forms]
    if not forms:
        raise InputError(f"the model has no node of the domain {DOMAIN}, so there is nothing to attach")
    # The first form has no overload name, so readers that know no overloads find it.
    before = [ops[:index].count(form.op) for index, form in enumerate(forms)]
    overloads = {form: f"form{count}" if count else "" for form, count in zip(forms, before, strict=True)}
    opsets = {imported.domain: imported.version for imported in model.opset_import}
    others = [other for other in model.functions if other.domain != DOMAIN or other.name not in ops]
    functions = [make_function(form, opsets[""], overloads[form]) for form in forms]
    del model.functions[:]
    model.functions.extend([*others, *functions])
    for node in nodes:
        form = _form(node)
        node.overload = overloads[form]
        complete_inputs(model.graph, node, form.inputs)
        # torch gives a node every output of the schema, but the function lacks the outputs that only kernels have.
        del node.output[len(form.outputs) :]
        present = {attribute.name for attribute in node.attribute}
        node.attribute.extend(default for default in attribute_defaults() if default.name not in present)
    if DOMAIN not in opsets:
        model.opset_import.append(helper.make_opsetid(DOMAIN, VERSION))


def rename_old_attention(model: onnx.ModelProto) -> None:
    """Rename nodes and functions ai.sharp::Attention to SharpAttention, in place, in a model from before the rename."""
    for node in model.graph.node:
        if (node.domain, node.op_type) == (DOMAIN, OLD_ATTENTION.name):
            node.op_type = ATTENTION.name
    for function in model.functions:
        if (function.domain, function.name) == (DOMAIN, OLD_ATTENTION.name):
            function.name = ATTENTION.name


def complete_inputs(graph: onnx.GraphProto, node: onnx.NodeProto, formal: Sequence[str]) -> None:
    """Give an op's node all inputs in `formal`, in place; an input that the node leaves out becomes an empty tensor.

    `formal` are the first names of the op's inputs in order; inputs of the node behind them are dropped. The empty
    tensors are initializers, which are added to the graph. Inputs left out may be of the types float32, int32 and C.
    """
    definition, _ = BODIES[node.op_type]
    parameters = (*definition.inputs, *definition.beside, *definition.constants)
    types = {parameter.name: parameter.type for parameter in parameters}
    actual = dict(zip(formal, node.input, strict=False))
    inputs = [actual.get(name) or ABSENT[types[name]] for name in formal]
    del node.input[:]
    node.input.extend(inputs)
    there = {initializer.name for initializer in graph.initializer}
    for name in sorted(set(ABSENT.values()) & set(inputs) - there):
        kind = TensorProto.INT32 if name == ABSENT["tensor(int32)"] else TensorProto.FLOAT
        graph.initializer.append(helper.make_tensor(name, kind, [0], []))


def _form(node: onnx.NodeProto) -> FunctionForm:
    """Return the form of function body that a node of our domain needs, from its attributes and given inputs.

    Raises:
        InputError: an attribute is out of range.
    """
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    normalizer = attributes.get("normalizer", b"").decode()
    check_attributes(attributes | {"normalizer": normalizer})
    coefficients = tuple(attributes.get("temperature_coefficients", ICML2025_COEFFICIENTS))
    return FunctionForm(
        node.op_type,
        normalizer,
        given_inputs(node),
        coefficients if normalizer == "adaptive_softmax" else (),
        attributes.get("stats_columns", DEFAULT_STATS_COLUMNS),
    )


def given_inputs(node: onnx.NodeProto) -> tuple[str, ...]:
    """Return the names of the optional inputs that an op's node has, in order.

    An empty name counts as left out, and so does an empty tensor of `complete_inputs`.
    """
    definition, _ = BODIES[node.op_type]
    optional = tuple(zip(definition.all_input_names, node.input, strict=False))[definition.required_inputs :]
    return tuple(name for name, value in optional if value and value not in ABSENT.values())
