"""The contract of the ops of domain `ai.sharp`, version 1: names, shapes, attributes and their defaults."""

from dataclasses import dataclass, replace

import onnx
from onnx import defs

from sharp.plugins.ops.attributes import DEFAULT_ALPHA as DEFAULT_ALPHA
from sharp.plugins.ops.attributes import DEFAULT_ENTROPY_THRESHOLD as DEFAULT_ENTROPY_THRESHOLD
from sharp.plugins.ops.attributes import DEFAULT_STATS_COLUMNS as DEFAULT_STATS_COLUMNS
from sharp.plugins.ops.attributes import ICML2025_COEFFICIENTS as ICML2025_COEFFICIENTS
from sharp.plugins.ops.attributes import NORMALIZERS as NORMALIZERS
from sharp.plugins.ops.attributes import TEMPERATURE_PRESETS as TEMPERATURE_PRESETS

DOMAIN = "ai.sharp"
VERSION = 1

REQUIRED_ATTRIBUTES = ("normalizer", "scale")
ATTRIBUTE_DEFAULTS: dict[str, float | int | str | tuple[float, ...]] = {
    "alpha": DEFAULT_ALPHA,
    "temperature_coefficients": ICML2025_COEFFICIENTS,
    "entropy_threshold": DEFAULT_ENTROPY_THRESHOLD,
    "softcap": 0.0,
    "window": -1,
    "causal": 1,
    # No key, stored or new, that a head with an ALiBi slope sees is longer (Euclidean); 0 = not known. With it kernels
    # leave out keys that surely have weight 0, so the result is the same unless one of those is NaN.
    "key_bound": 0.0,
    # 5 adds the sink's mass to `stats` as the last column.
    "stats_columns": DEFAULT_STATS_COLUMNS,
    # TensorRT's parser looks for a plugin only on nodes that carry these two.
    "plugin_namespace": "",
    "plugin_version": "1",
}

FLOATS = ("tensor(float)", "tensor(float16)", "tensor(bfloat16)")


@dataclass(frozen=True)
class Parameter:
    """An input or output: its name, its type (T, C or a tensor type) and what it holds."""

    name: str
    type: str
    doc: str
    optional: bool = False


@dataclass(frozen=True)
class OpDefinition:
    """An op of the domain; every op has the attributes above.

    `beside` are auxiliary cache tensors, optional inputs that follow `inputs`, and follow `outputs` with "_out" behind
    their names. `constants` are optional inputs that come last.
    """

    name: str
    doc: str
    inputs: tuple[Parameter, ...]
    outputs: tuple[Parameter, ...]
    beside: tuple[Parameter, ...] = ()
    constants: tuple[Parameter, ...] = ()

    @property
    def required_inputs(self) -> int:
        """How many inputs every node has; the optional ones follow."""
        return sum(not parameter.optional for parameter in self.inputs)

    @property
    def input_names(self) -> tuple[str, ...]:
        """The names of the inputs in order."""
        return tuple(parameter.name for parameter in self.inputs)

    @property
    def all_input_names(self) -> tuple[str, ...]:
        """Those, and the auxiliary cache tensors and constants behind them."""
        return tuple(parameter.name for parameter in (*self.inputs, *self.beside, *self.constants))

    @property
    def output_names(self) -> tuple[str, ...]:
        """The names of the outputs in order."""
        return tuple(parameter.name for parameter in self.outputs)


# What both ops take last.
_HEAD_PARAMS = Parameter(
    "head_params",
    "tensor(float)",
    "[q_heads, P], per-head parameters of the normalizer (ssa: b, n); one more column, the last, is the head's sink: a "
    "logit that competes with those of the keys and has no value, -infinity for none",
    optional=True,
)
_ALIBI_SLOPES = Parameter(
    "alibi_slopes", "tensor(float)", "[q_heads], the bias of key j for position p is -slope * |j - p|", optional=True
)
_COLLECT_STATS = Parameter(
    "collect_stats", "tensor(bool)", "scalar; absent or false: `stats` is all zeros and costs nothing", optional=True
)

_STATISTICS = (
    "stats_columns]: entropy (nats), support, inverse temperature, logit spread; where there are 5 also the sink's "
    "mass, its share of the sum that a row's weights are divided by"
)

PAGED_ATTENTION = OpDefinition(
    "PagedAttention",
    "Attention over a paged key-value cache, with the normalizer as an attribute.",
    inputs=(
        Parameter("query", "T", "[tokens, q_heads, head_dim], tokens of all sequences packed, positions applied"),
        Parameter("key", "T", "[tokens, kv_heads, head_dim]"),
        Parameter("value", "T", "[tokens, kv_heads, value_dim]"),
        Parameter("key_cache", "C", "[blocks, kv_heads, head_dim, block_size], dimension-major inside a block"),
        Parameter("value_cache", "C", "[blocks, kv_heads, block_size, value_dim]"),
        Parameter("slot_mapping", "tensor(int32)", "[tokens], block * block_size + offset, -1 = do not store"),
        Parameter("block_table", "tensor(int32)", "[sequences, max_blocks], -1 = unused"),
        Parameter("query_start", "tensor(int32)", "[sequences + 1], cumulative number of tokens"),
        Parameter("context_lens", "tensor(int32)", "[sequences], tokens in the cache before this step"),
        _HEAD_PARAMS,
        _ALIBI_SLOPES,
        _COLLECT_STATS,
    ),
    outputs=(
        Parameter("output", "T", "[tokens, q_heads, value_dim]"),
        Parameter("key_cache_out", "C", "key_cache with the new keys stored"),
        Parameter("value_cache_out", "C", "value_cache with the new values stored"),
        Parameter("stats", "tensor(float)", f"[tokens, q_heads, {_STATISTICS}"),
    ),
    beside=(
        Parameter("key_scale", "tensor(float)", "[blocks, kv_heads], of int8 and fp8 caches: a key is scale * number"),
        Parameter(
            "value_scale", "tensor(float)", "[blocks, kv_heads], of int8 and fp8 caches: a value is scale * number"
        ),
        Parameter(
            "key_screen",
            "tensor(int8)",
            "[blocks, kv_heads, block_size * (head_dim rounded up to 4, and 8)] for entmax over a cache of floats: the "
            "keys in 8 bits, by which kernels leave out what surely has weight 0; zeros: not known",
        ),
    ),
    constants=(
        Parameter("key_shift", "tensor(float)", "[kv_heads, head_dim], what key_screen has taken off the keys"),
    ),
)

ATTENTION = OpDefinition(
    "SharpAttention",
    """Attention over contiguous keys and values, with the normalizer as an attribute.

Names, order and meaning are those of ONNX's standard Attention where the two coincide (query, key, value, past_key,
past_value; present_key, present_value; soft cap before bias; causal mask aligned by the past). There is no attn_mask:
who sees whom follows from positions and lengths. Three forms, by the optional inputs that are given:

- No cache: neither past_key nor past_value. The keys are `key`; present_key is key, C is T.
- Concatenating: past_key and past_value without past_lens. The keys are past_key followed by key, along axis 2, and so
  is present_key. `past`, the number of keys before this call, may be 0 and is the same for the whole batch.
- Shared buffer: past_lens too. Axis 2 of past_key and past_value is the capacity of a buffer, of which sequence b has
  filled past_lens[b] places. New key i goes to place past_lens[b] + i, and present_key is the whole buffer, in place
  when both are bound to one memory. A place at or beyond total_lens[b] is not written, so padding needs no room; a new
  key that counts and does not fit the capacity is an error.

Query i of sequence b stands at position p = past + i (p = past_lens[b] + i in a shared buffer, p = i without a past),
whatever the number of new keys is. Of the past and the new keys of sequence b the first total_lens[b] count, all of
them where it is left out; the rest is padding, which no query sees. Key j is visible to position p when causal is 0 or
j <= p; with window w when p - w < j <= p. A query that is padding itself is computed like any other.

A logit is softcap(scale * query . key) - slope * |j - p|: under causal the usual slope * (j - p); without it the bias
falls off to both sides alike. A query that sees no key has output 0 and statistics 0.""",
    inputs=(
        Parameter("query", "T", "[batch, q_heads, queries, head_dim], positions applied"),
        Parameter("key", "T", "[batch, kv_heads, new_keys, head_dim]; kv_heads divides q_heads"),
        Parameter("value", "T", "[batch, kv_heads, new_keys, value_dim]"),
        Parameter("past_key", "C", "[batch, kv_heads, past or capacity, head_dim]", optional=True),
        Parameter("past_value", "C", "[batch, kv_heads, past or capacity, value_dim]; with past_key", optional=True),
        Parameter("past_lens", "tensor(int32)", "[batch], filled places of a shared buffer", optional=True),
        Parameter("total_lens", "tensor(int32)", "[batch], keys that are not padding, past included", optional=True),
        _HEAD_PARAMS,
        _ALIBI_SLOPES,
        _COLLECT_STATS,
    ),
    outputs=(
        Parameter("output", "T", "[batch, q_heads, queries, value_dim]"),
        Parameter("present_key", "C", "[batch, kv_heads, past + new_keys or capacity, head_dim]", optional=True),
        Parameter("present_value", "C", "[batch, kv_heads, past + new_keys or capacity, value_dim]", optional=True),
        Parameter(
            "stats",
            "tensor(float)",
            f"[batch, q_heads, queries, {_STATISTICS}",
            optional=True,
        ),
    ),
)

# Its name in models that were exported before the rename: tools that match nodes by name alone, as ONNX Runtime's
# quantizer and TensorRT's parser do, took them for Microsoft's or ONNX's Attention.
OLD_ATTENTION = replace(ATTENTION, name="Attention")

OPS = (PAGED_ATTENTION, ATTENTION, OLD_ATTENTION)

INPUTS = PAGED_ATTENTION.input_names
OUTPUTS = PAGED_ATTENTION.output_names
BESIDE_CACHE = tuple(parameter.name for parameter in PAGED_ATTENTION.beside)
CONSTANTS = tuple(parameter.name for parameter in PAGED_ATTENTION.constants)
SCALES = ("key_scale", "value_scale")  # of an int8 or fp8 cache

ABSENT = {"tensor(int32)": "ai.sharp.absent.int32", "C": "ai.sharp.absent", "tensor(float)": "ai.sharp.absent"}
"""By type, the initializer [0] for an optional input that is left out; every kernel takes an empty tensor as absent."""


def register_schema() -> None:
    """Make the ops known to onnx in this process; calling it again changes nothing.

    The checker, shape inference, onnxscript and `torch.onnx.export` find the ops' attributes through it.
    """
    for definition in OPS:
        if not defs.has(definition.name, domain=DOMAIN):
            defs.register_schema(_schema(definition))


def attribute_defaults() -> list[onnx.AttributeProto]:
    """The optional attributes with their default values, as a schema or a function declares them."""
    return [onnx.helper.make_attribute(name, value) for name, value in ATTRIBUTE_DEFAULTS.items()]


def _schema(definition: OpDefinition) -> defs.OpSchema:
    option = defs.OpSchema.FormalParameterOption

    def formal(parameter: Parameter) -> defs.OpSchema.FormalParameter:
        return defs.OpSchema.FormalParameter(
            parameter.name,
            parameter.type,
            parameter.doc,
            param_option=option.Optional if parameter.optional else option.Single,
        )

    beside, constants = (
        [replace(parameter, optional=True) for parameter in part] for part in (definition.beside, definition.constants)
    )
    attribute = defs.OpSchema.Attribute
    required = [
        attribute("normalizer", defs.OpSchema.AttrType.STRING, " | ".join(NORMALIZERS)),
        attribute("scale", defs.OpSchema.AttrType.FLOAT, "factor of query . key"),
    ]
    return defs.OpSchema(
        definition.name,
        DOMAIN,
        VERSION,
        definition.doc,
        inputs=[formal(parameter) for parameter in (*definition.inputs, *beside, *constants)],
        outputs=[
            *(formal(parameter) for parameter in definition.outputs),
            *(formal(replace(parameter, name=f"{parameter.name}_out")) for parameter in beside),
        ],
        type_constraints=[
            ("T", list(FLOATS), "query, key, value and output"),
            ("C", [*FLOATS, "tensor(int8)", "tensor(float8e4m3fn)"], "the cache"),
        ],
        attributes=required + [attribute(default.name, default) for default in attribute_defaults()],
    )
