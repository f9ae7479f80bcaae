"""The ops' definition as onnx registers it: `register_schema`, and the names of inputs and outputs."""

import onnx
from onnx import defs

from sharp.plugins.op.attributes import ATTRIBUTE_DEFAULTS as ATTRIBUTE_DEFAULTS
from sharp.plugins.op.attributes import DEFAULT_ALPHA as DEFAULT_ALPHA
from sharp.plugins.op.attributes import DEFAULT_ENTROPY_THRESHOLD as DEFAULT_ENTROPY_THRESHOLD
from sharp.plugins.op.attributes import DEFAULT_STATS_COLUMNS as DEFAULT_STATS_COLUMNS
from sharp.plugins.op.attributes import NORMALIZERS as NORMALIZERS
from sharp.plugins.op.attributes import REQUIRED_ATTRIBUTES as REQUIRED_ATTRIBUTES
from sharp.plugins.op.attributes import TEMPERATURE_PRESETS as TEMPERATURE_PRESETS
from sharp.plugins.op.definition import ATTENTION as ATTENTION
from sharp.plugins.op.definition import ATTRIBUTES, FLOATS, Attribute
from sharp.plugins.op.definition import DOMAIN as DOMAIN
from sharp.plugins.op.definition import ICML2025_COEFFICIENTS as ICML2025_COEFFICIENTS
from sharp.plugins.op.definition import OLD_ATTENTION as OLD_ATTENTION
from sharp.plugins.op.definition import OPS as OPS
from sharp.plugins.op.definition import PAGED_ATTENTION as PAGED_ATTENTION
from sharp.plugins.op.definition import VERSION as VERSION
from sharp.plugins.op.definition import OpDefinition as OpDefinition
from sharp.plugins.op.definition import Parameter as Parameter

INPUTS = PAGED_ATTENTION.input_names
OUTPUTS = PAGED_ATTENTION.output_names
BESIDE_CACHE = tuple(parameter.name for parameter in PAGED_ATTENTION.beside)
CONSTANTS = tuple(parameter.name for parameter in PAGED_ATTENTION.constants)
SCALES = ("key_scale", "value_scale")  # given with int8 and fp8 caches

ABSENT = {"tensor(int32)": "ai.sharp.absent.int32", "C": "ai.sharp.absent", "tensor(float)": "ai.sharp.absent"}
"""The name of the empty initializer [0], by type, that stands for an optional input that is left out.

Every kernel takes an empty tensor as absent.
"""


def register_schema() -> None:
    """Make the ops known to onnx in this process; a second call changes nothing.

    The checker, shape inference, onnxscript and `torch.onnx.export` find the ops' attributes in the registered schema.
    """
    for definition in OPS:
        if not defs.has(definition.name, domain=DOMAIN):
            defs.register_schema(_schema(definition))


def attribute_defaults() -> list[onnx.AttributeProto]:
    """Return the optional attributes with their default values, as a schema or a function declares them."""
    return [onnx.helper.make_attribute(name, value) for name, value in ATTRIBUTE_DEFAULTS.items()]


def _schema(definition: OpDefinition) -> defs.OpSchema:
    """Return the ONNX schema of an op of our domain."""
    option = defs.OpSchema.FormalParameterOption

    def formal(parameter: Parameter) -> defs.OpSchema.FormalParameter:
        """Return an input or output as ONNX's schema has it."""
        return defs.OpSchema.FormalParameter(
            parameter.name,
            parameter.type,
            parameter.text,
            param_option=option.Optional if parameter.optional else option.Single,
        )

    return defs.OpSchema(
        definition.name,
        DOMAIN,
        VERSION,
        definition.doc,
        inputs=[formal(parameter) for parameter in definition.all_inputs],
        outputs=[formal(parameter) for parameter in definition.all_outputs],
        type_constraints=[
            ("T", list(FLOATS), "query, key, value and output"),
            ("C", [*FLOATS, "tensor(int8)", "tensor(float8e4m3fn)"], "the cache"),
        ],
        attributes=[_schema_attribute(attribute) for attribute in ATTRIBUTES],
    )


def _schema_attribute(attribute: Attribute) -> defs.OpSchema.Attribute:
    """Return the ONNX schema of an attribute, with its default, or as required if it has none."""
    if attribute.default is not None:
        return defs.OpSchema.Attribute(attribute.name, onnx.helper.make_attribute(attribute.name, attribute.default))
    return defs.OpSchema.Attribute(
        attribute.name, getattr(defs.OpSchema.AttrType, attribute.type.upper()), attribute.doc
    )
