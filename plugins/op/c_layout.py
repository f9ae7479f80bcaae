"""The C structures of a call, with fields in order; `generate.py` declares them in C, and `ctypes` mirrors them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from sharp.plugins.op.definition import ATTRIBUTES, MOST_COEFFICIENTS, OpDefinition, Parameter

Kind = Literal["enum", "int32", "int64", "float", "floats", "pointer", "attributes"]


@dataclass(frozen=True)
class Field:
    """A field of a C structure; `type` is its C type without the name, `comment` the comment for its declaration."""

    name: str
    kind: Kind
    type: str
    comment: str = ""

    @property
    def declaration(self) -> str:
        """The C declaration of the field, such as `int64_t tokens;`, without its comment."""
        rows = f"[{MOST_COEFFICIENTS}]" if self.kind == "floats" else ""
        return f"{self.type} {self.name}{rows};"


_ELEMENTS = {
    "T": "void",
    "C": "void",
    "tensor(float)": "float",
    "tensor(int32)": "int32_t",
    "tensor(int8)": "int8_t",
    "tensor(bool)": "uint8_t",
}


def attribute_fields() -> Iterator[Field]:
    """Yield the fields of the C struct SharpAttributes in order: the attributes that kernels read.

    `temperature_terms` follows `temperature_coefficients` and holds the number of coefficients.
    """
    for attribute in ATTRIBUTES:
        if attribute.name == "normalizer":
            yield Field("normalizer", "enum", "SharpNormalizer")
        elif attribute.native and attribute.type == "floats":
            yield Field(attribute.name, "floats", "float", attribute.doc)
            yield Field("temperature_terms", "int32", "int32_t", "numbers of temperature_coefficients")
        elif attribute.native:
            integer = attribute.type == "int"
            yield Field(
                attribute.name, "int32" if integer else "float", "int32_t" if integer else "float", attribute.doc
            )


def call_fields(op: OpDefinition) -> Iterator[Field]:
    """Yield the fields of the C struct of a call of `op` in order: attributes, sizes, flags, types, buffers.

    A flag says whether an optional parameter is given. An output that shares an input's memory has no buffer field of
    its own; the input's pointer is then not const.
    """
    yield Field("attributes", "attributes", "SharpAttributes")
    for symbol in op.symbols:
        yield Field(symbol, "int64", "int64_t")
    yield Field("multiprocessors", "int64", "int64_t", "that the call is planned for; 0: those of the current device")
    for parameter in (*op.all_inputs, *op.outputs):
        if parameter.flag:
            yield Field(parameter.flag, "int32", "int32_t", f"whether {parameter.name} is given, before buffers are")
    yield Field("type", "enum", "SharpType", "T")
    if op.mixed:
        yield Field("cache_type", "enum", "SharpType", "C")
    updated = {output.alias for output in op.all_outputs}
    for parameter in op.all_inputs:
        yield _buffer(parameter, "" if parameter.name in updated else "const ")
    for parameter in op.outputs:
        if not parameter.alias:
            yield _buffer(parameter, "")


def _buffer(parameter: Parameter, const: str) -> Field:
    """Return the C struct's field for an input or output: a pointer to its elements. `const` is "const " or ""."""
    kind = {"T": "type ", "C": "cache_type "}.get(parameter.type, "")
    comment = f"{kind}{parameter.text}{'; or null' if parameter.optional else ''}"
    return Field(parameter.name, "pointer", f"{const}{_ELEMENTS[parameter.type]}*", comment)
