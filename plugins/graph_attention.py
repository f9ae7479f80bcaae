"""The attention nodes of a model file, read and shown without the onnx package, which servers do not have."""

import struct
from dataclasses import dataclass

from sharp.plugins.errors import InputError
from sharp.plugins.ops.attributes import DEFAULT_ALPHA, DEFAULT_ENTROPY_THRESHOLD, ICML2025_COEFFICIENTS
from sharp.plugins.ops.normalizers import Normalizer
from sharp.plugins.wire_format import DamagedError, field, fields, integers

OP = "PagedAttention"
# The op's inputs that say what a head does with its keys, by their places.
SHOWN = {"query": 0, "head_params": 9, "alibi_slopes": 10}
KEY_CACHE = 3
ABSENT = "ai.sharp.absent"  # begins the name of what stands for an optional input that is left out
# Fields of onnx.proto3.
GRAPH, NODE, OUTPUT = 7, 1, 12
INPUT_NAME, OUTPUT_NAME, OP_TYPE, ATTRIBUTE = 1, 2, 4, 5
NAME, FLOAT, INTEGER, TEXT, FLOATS = 1, 2, 3, 4, 7


@dataclass(frozen=True)
class AttentionNode:
    """An attention node: the values that go into it, by the names of `SHOWN`, and its attributes."""

    layer: int
    inputs: dict[str, str]
    normalizer: Normalizer
    scale: float
    softcap: float
    window: int

    def output(self, name: str) -> str:
        """The name of the output that shows one of the inputs."""
        return f"shown.{self.layer}.{name}"


def attention_nodes(model: bytes) -> tuple[AttentionNode, ...]:
    """Those of a model's graph, in the order of the layers.

    Raises:
        InputError: the bytes are no model.
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
    """The model with outputs that show what goes into its attention nodes."""
    added = bytearray()
    for node in nodes:
        for name, value in node.inputs.items():
            output = node.output(name).encode()
            identity = field(INPUT_NAME, value.encode()) + field(OUTPUT_NAME, output) + field(OP_TYPE, b"Identity")
            added += field(NODE, identity) + field(OUTPUT, field(NAME, output))
    return model + field(GRAPH, bytes(added))


def _read(node: memoryview) -> AttentionNode:
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
    """The attributes of a node by name."""

    def __init__(self) -> None:
        self.numbers: dict[str, float] = {}
        self.integers: dict[str, int] = {}
        self.texts: dict[str, str] = {}
        self.rows: dict[str, tuple[float, ...]] = {}

    def read(self, attribute: memoryview) -> None:
        name = _text(attribute, NAME)
        row: list[float] = []
        for number, value in fields(attribute):
            if number == FLOAT:
                self.numbers[name] = _floats(value)[0]
            elif number == INTEGER:
                self.integers[name] = integers(value)[0]
            elif number == TEXT:
                self.texts[name] = _name(value)
            elif number == FLOATS:  # packed or not
                row += _floats(value)
        if row:
            self.rows[name] = tuple(row)


def _text(message: memoryview, number_of: int) -> str:
    return next((_name(value) for number, value in fields(message) if number == number_of), "")


def _name(value: int | memoryview) -> str:
    if isinstance(value, int):
        raise DamagedError
    return bytes(value).decode()


def _floats(value: int | memoryview) -> list[float]:
    if isinstance(value, int):
        raise DamagedError
    return [number for (number,) in struct.iter_unpack("<f", value)]
