"""The attention nodes of a model file, read and exposed without the onnx package, which servers do not have."""

import struct
from dataclasses import dataclass

from sharp.core.errors import InputError
from sharp.core.wire_format import DamagedError, field, fields, integers
from sharp.plugins.op.attributes import DEFAULT_ALPHA, DEFAULT_ENTROPY_THRESHOLD, ICML2025_COEFFICIENTS
from sharp.plugins.op.normalizers import Normalizer

OP = "PagedAttention"
# The op's inputs that determine the weights of a head's keys, by their position among the inputs.
SHOWN = {"query": 0, "head_params": 9, "alibi_slopes": 10}
KEY_CACHE = 3
ABSENT = "ai.sharp.absent"  # prefix of the names of empty tensors, which stand for optional inputs that are left out
# Numbers of the fields in onnx.proto3.
GRAPH, NODE, OUTPUT = 7, 1, 12
INPUT_NAME, OUTPUT_NAME, OP_TYPE, ATTRIBUTE = 1, 2, 4, 5
NAME, FLOAT, INTEGER, TEXT, FLOATS = 1, 2, 3, 4, 7


@dataclass(frozen=True)
class AttentionNode:
    """An attention node: its attributes, and the inputs that determine the weights of a head's keys.

    `inputs` are the names of the node's input values by the op's names query, head_params and alibi_slopes, without
    inputs that the node leaves out.
    """

    layer: int
    inputs: dict[str, str]
    normalizer: Normalizer
    scale: float
    softcap: float
    window: int

    def output(self, name: str) -> str:
        """Return the name of the output that exposes the input `name` (a key of `inputs`) in a model from `showing`."""
        return f"shown.{self.layer}.{name}"


def attention_nodes(model: bytes) -> tuple[AttentionNode, ...]:
    """Return the PagedAttention nodes of a model's graph, in the order of the layers; empty if there are none.

    `model` is the content of an ONNX file.

    Raises:
        InputError: the bytes are not a model of sharp-export.
    """
    found = []
    try:
        for number, graph in fields(memoryview(model)):
            if number != GRAPH or not isinstance(graph, memoryview):
                continue
            for part, node in fields(graph):
                if part == NODE and isinstance(node, memoryview) and _text(node, OP_TYPE) == OP:
                    found.append(_read(node))
    except (DamagedError, IndexError, KeyError, TypeError, ValueError, struct.error) as error:
        raise InputError("the model file is damaged, or not of sharp-export; export it again") from error
    return tuple(sorted(found, key=lambda node: node.layer))


def showing(model: bytes, nodes: tuple[AttentionNode, ...]) -> bytes:
    """Return the bytes of the model with added outputs that expose the inputs of its attention nodes.

    `nodes` are those that `attention_nodes` found; `AttentionNode.output` names the outputs.
    """
    added = bytearray()
    for node in nodes:
        for name, value in node.inputs.items():
            output = node.output(name).encode()
            identity = field(INPUT_NAME, value.encode()) + field(OUTPUT_NAME, output) + field(OP_TYPE, b"Identity")
            added += field(NODE, identity) + field(OUTPUT, field(NAME, output))
    return model + field(GRAPH, bytes(added))


def _read(node: memoryview) -> AttentionNode:
    """Decode an attention node's inputs, attributes and layer from its protobuf bytes.

    The layer is the number at the end of the key cache's name.
    """
    inputs = [_name(value) for number, value in fields(node) if number == INPUT_NAME]
    attributes = _Attributes()
    for number, value in fields(node):
        if number == ATTRIBUTE and isinstance(value, memoryview):
            attributes.read(value)
    there = {name: inputs[place] for name, place in SHOWN.items() if place < len(inputs)}
    numbers = attributes.numbers
    return AttentionNode(
        layer=int(inputs[KEY_CACHE].rpartition(".")[2]),
        inputs={name: value for name, value in there.items() if value and not value.startswith(ABSENT)},
        normalizer=Normalizer(
            attributes.texts["normalizer"],
            numbers.get("alpha", DEFAULT_ALPHA),
            attributes.rows.get("temperature_coefficients", ICML2025_COEFFICIENTS),
            numbers.get("entropy_threshold", DEFAULT_ENTROPY_THRESHOLD),
        ),
        scale=numbers["scale"],
        softcap=numbers.get("softcap", 0.0),
        window=attributes.integers.get("window", -1),
    )


class _Attributes:
    """The attributes of an ONNX node, read from its protobuf message: numbers, integers, texts and rows by name.

    `rows` are lists of floats.
    """

    def __init__(self) -> None:
        self.numbers: dict[str, float] = {}
        self.integers: dict[str, int] = {}
        self.texts: dict[str, str] = {}
        self.rows: dict[str, tuple[float, ...]] = {}

    def read(self, attribute: memoryview) -> None:
        """Decode one AttributeProto and keep its value by name: a float, an integer, a text or a row of floats."""
        name = _text(attribute, NAME)
        row: list[float] = []
        for number, value in fields(attribute):
            if number == FLOAT:
                self.numbers[name] = _floats(value)[0]
            elif number == INTEGER:
                self.integers[name] = integers(value)[0]
            elif number == TEXT:
                self.texts[name] = _name(value)
            elif number == FLOATS:  # a repeated field, packed or not
                row += _floats(value)
        if row:
            self.rows[name] = tuple(row)


def _text(message: memoryview, number_of: int) -> str:
    """Return the message's first field of number `number_of` as text; "" if there is none."""
    return next((_name(value) for number, value in fields(message) if number == number_of), "")


def _name(value: int | memoryview) -> str:
    """Return a protobuf field's bytes as text; raise DamagedError for a number."""
    if isinstance(value, int):
        raise DamagedError
    return bytes(value).decode()


def _floats(value: int | memoryview) -> list[float]:
    """Return the float32 numbers of a protobuf field, packed or single; raise DamagedError for a varint."""
    if isinstance(value, int):
        raise DamagedError
    return [number for (number,) in struct.iter_unpack("<f", value)]
