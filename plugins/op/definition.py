"""The definition of the ops of domain `ai.sharp`, version 1: normalizers, attributes, inputs and outputs, each once.

Python code imports this module. From it `python -m sharp.plugins.op.generate` writes the C header `sharp_op.h`, the
tables of `docs/contract.md` and the JSON Schema of the manifest. `make lint` fails if a generated file is stale.
"""

import math
import re
from dataclasses import dataclass, replace
from typing import Literal

DOMAIN = "ai.sharp"
VERSION = 1

Number = int | float
Default = str | int | float | tuple[float, ...]


@dataclass(frozen=True)
class AttributeLimits:
    """The numbers that an attribute allows: finite ones from `least` to `most`, without `least` itself if `open`.

    Attributes:
        rule: the limits in words, to follow "it must be".
        infinite: whether +infinity is allowed, too.
        normalizer: the normalizer whose calls are checked, "" for all.
        gpu: whether only calls on a GPU are checked.
    """

    rule: str
    least: float = -math.inf
    most: float = math.inf
    open: bool = False
    infinite: bool = False
    normalizer: str = ""
    gpu: bool = False

    def allow(self, number: Number) -> bool:
        """Whether a number is allowed; NaN never is. `normalizer` and `gpu` are not considered."""
        above = self.least < number if self.open else self.least <= number
        return above and number <= self.most and (self.infinite or math.isfinite(number))


@dataclass(frozen=True)
class Column:
    """A column of `head_params`, which holds finite numbers, above 0 if `positive`."""

    name: str
    positive: bool = False


@dataclass(frozen=True)
class NormalizerDefinition:
    """A normalizer of the ops. `code` is its number in compiled code, which never changes.

    Attributes:
        columns: the normalizer's own columns of `head_params`; a sink is one more column behind them.
        competes: whether weights are divided by their sum, so that keys compete and a sink can take part. If not, the
            normalizer's own columns may be left out.
        sparse: whether a visible key can have the weight 0; the statistic `support` then counts keys with other
            weights.
        passes: the number of sets of sums that kernels keep. 1 means that running sums are enough; more, that a weight
            is known only after a pass over all logits of the row.
    """

    name: str
    code: int
    columns: tuple[Column, ...] = ()
    competes: bool = True
    sparse: bool = False
    passes: int = 1

    @property
    def needs_columns(self) -> bool:
        """Whether a call without `head_params` is refused."""
        return bool(self.columns) and self.competes


@dataclass(frozen=True)
class Attribute:
    """An attribute of the ops: its type, its default (None: required on every node) and the numbers that it allows.

    `native` is whether kernels read the attribute.
    """

    name: str
    type: Literal["float", "int", "string", "floats"]
    default: Default | None
    doc: str
    limits: tuple[AttributeLimits, ...] = ()
    native: bool = True


@dataclass(frozen=True)
class Parameter:
    """An input or output of an op: its name, its type (T, C or a tensor type), its shape by symbols and its content.

    Attributes:
        shape: a dimension is a symbol (`tokens`), a symbol and a number (`sequences + 1`), or `screen_bytes`, which
            `key_screen.screen_bytes` computes; None is any shape.
        optional: whether a node may leave the parameter out.
        flag: the field of the C struct that says whether the parameter is given, if that must be known before buffers
            are.
        alias: for an output, the input whose memory it shares.
    """

    name: str
    type: str
    shape: tuple[str, ...] | None
    doc: str = ""
    optional: bool = False
    flag: str = ""
    alias: str = ""

    @property
    def shape_text(self) -> str:
        """The shape as text, for schemas, tables and messages."""
        return "scalar" if self.shape is None else f"[{', '.join(self.shape)}]"

    @property
    def text(self) -> str:
        """The shape and the content as text, for schemas."""
        return ", ".join(filter(None, (self.shape_text, self.doc)))


@dataclass(frozen=True)
class OpDefinition:
    """An op of the domain; every op has the attributes of `ATTRIBUTES`.

    Attributes:
        beside: auxiliary cache tensors: optional inputs behind `inputs`, and outputs behind `outputs` with "_out"
            appended to their names.
        constants: optional inputs that come last.
        mixed: whether the type C may differ from T.
    """

    name: str
    doc: str
    inputs: tuple[Parameter, ...]
    outputs: tuple[Parameter, ...]
    beside: tuple[Parameter, ...] = ()
    constants: tuple[Parameter, ...] = ()
    mixed: bool = False

    @property
    def required_inputs(self) -> int:
        """The number of inputs that every node has; they come first, and optional inputs follow."""
        return sum(not parameter.optional for parameter in self.inputs)

    @property
    def all_inputs(self) -> tuple[Parameter, ...]:
        """All inputs in order: the op's own, auxiliary cache tensors, constants."""
        return (*self.inputs, *self.beside, *self.constants)

    @property
    def all_outputs(self) -> tuple[Parameter, ...]:
        """All outputs in order: the op's own, then the updated auxiliary cache tensors, called NAME_out."""
        updated = (
            replace(tensor, name=f"{tensor.name}_out", alias=tensor.name, doc="", flag="") for tensor in self.beside
        )
        return (*self.outputs, *updated)

    @property
    def input_names(self) -> tuple[str, ...]:
        """The names of `inputs` in order. Auxiliary cache tensors (scales, key screen) and constants are left out."""
        return tuple(parameter.name for parameter in self.inputs)

    @property
    def all_input_names(self) -> tuple[str, ...]:
        """The names of all inputs in order."""
        return tuple(parameter.name for parameter in self.all_inputs)

    @property
    def output_names(self) -> tuple[str, ...]:
        """The names of `outputs` in order: results, caches and stats, but not updated scales and key screens."""
        return tuple(parameter.name for parameter in self.outputs)

    @property
    def symbols(self) -> tuple[str, ...]:
        """The symbols of sizes in the shapes of all inputs, each once, in order of appearance; not "screen_bytes"."""
        words = (re.split(r"\W+", dimension)[0] for tensor in self.all_inputs for dimension in tensor.shape or ())
        return tuple(dict.fromkeys(word for word in words if word != "screen_bytes"))


NORMALIZERS = (
    NormalizerDefinition("softmax", 0),
    NormalizerDefinition("ssa", 1, (Column("b", positive=True), Column("n", positive=True))),
    NormalizerDefinition("adaptive_softmax", 2, passes=2),
    NormalizerDefinition("entmax", 3, sparse=True, passes=3),
    NormalizerDefinition("sigmoid", 4, (Column("bias"), Column("power")), competes=False),
    NormalizerDefinition("relu", 5, (Column("power"),), competes=False, sparse=True),
    NormalizerDefinition("relu2", 6, (Column("power"),), competes=False, sparse=True),
    NormalizerDefinition("softpick", 7, sparse=True),
)

CUSTOM_NAME = r"[a-z][a-z0-9_-]{0,63}"  # the pattern of the name of a user's normalizer

ICML2025_COEFFICIENTS = (-0.037, 0.481, -2.3, 4.917, -1.791)
"""Inverse temperature as a polynomial of the entropy in nats, highest power first (ICML 2025, Fig. 4)."""

MOST_COEFFICIENTS = 8
"""The maximum length of `temperature_coefficients`: kernels have room for this many numbers."""

ATTRIBUTES = (
    Attribute("normalizer", "string", None, " | ".join(normalizer.name for normalizer in NORMALIZERS)),
    Attribute(
        "scale",
        "float",
        None,
        "factor of query . key",
        (AttributeLimits("a positive, finite number", least=0, open=True),),
    ),
    Attribute(
        "alpha",
        "float",
        1.5,
        "of entmax",
        (
            AttributeLimits("a finite number above 1 for entmax", least=1, open=True, normalizer="entmax"),
            # Weights next to the threshold are roots of order alpha - 1 of float32 differences, too inexact for large
            # alpha.
            AttributeLimits("at most 4 for entmax on a GPU", most=4, normalizer="entmax", gpu=True),
        ),
    ),
    Attribute(
        "temperature_coefficients",
        "floats",
        ICML2025_COEFFICIENTS,
        f"of adaptive_softmax, highest power first; 1 to {MOST_COEFFICIENTS} numbers",
    ),
    Attribute("entropy_threshold", "float", 0.5, "of adaptive_softmax, in nats"),
    Attribute("softcap", "float", 0.0, "0 = off", (AttributeLimits("0 (off) or a positive, finite number", least=0),)),
    Attribute("window", "int", -1, "-1 = off", (AttributeLimits("-1 (off), 0 or more", least=-1),)),
    Attribute("causal", "int", 1, "0: a query sees keys behind it too"),
    # With a key bound, kernels skip keys that surely have weight 0. The result is the same unless a skipped key is NaN.
    Attribute(
        "key_bound",
        "float",
        0.0,
        "no key, stored or new, that a head with an ALiBi slope sees is longer (Euclidean); 0 = not known",
        (AttributeLimits("0 (not known) or positive", least=0, infinite=True),),
    ),
    Attribute(
        "stats_columns",
        "int",
        4,
        "columns of `stats`: 5 adds the sink's mass; `sharp-export` sets it where heads have sinks",
        (AttributeLimits("4, or 5 with the sink's mass", least=4, most=5),),
    ),
    # TensorRT's parser looks for a plugin only for nodes with plugin_namespace and plugin_version.
    Attribute("plugin_namespace", "string", "", "for TensorRT's parser", native=False),
    Attribute("plugin_version", "string", "1", "for TensorRT's parser", native=False),
)

FLOATS = ("tensor(float)", "tensor(float16)", "tensor(bfloat16)")
TYPES = ("float32", "float16", "bfloat16", "int8", "fp8")
"""Types of tensors, by their number in compiled code. T is one of the first three, C any of them. fp8 is e4m3."""
SCALED_CACHES = ("int8", "fp8")
"""Types of caches with a scale per block: a key or value is the stored number times the scale."""

# The inputs that both ops take last.
_HEAD_INPUTS = (
    Parameter(
        "head_params",
        "tensor(float)",
        ("q_heads", "parameters"),
        "the normalizer's own columns (ssa: b, n; sigmoid: bias, power; relu, relu2: power; others none); one more "
        "column, the last, is the head's sink: a logit that competes with those of the keys and has no value, "
        "-infinity for none",
        optional=True,
    ),
    Parameter(
        "alibi_slopes",
        "tensor(float)",
        ("q_heads",),
        "the bias of key j for position p is -slope * |j - p|",
        optional=True,
        flag="alibi",
    ),
    Parameter(
        "collect_stats", "tensor(bool)", None, "absent or false: `stats` is zeros and is not computed", optional=True
    ),
)
_STATISTICS = (
    "entropy (nats), support, inverse temperature, logit spread; a fifth column is the sink's share of the sum that "
    "divides a row's weights"
)

PAGED_ATTENTION = OpDefinition(
    "PagedAttention",
    "Attention over a paged key-value cache, with the normalizer as an attribute.",
    inputs=(
        Parameter(
            "query",
            "T",
            ("tokens", "q_heads", "head_dim"),
            "tokens of all sequences packed, positions applied; kv_heads divides q_heads",
        ),
        Parameter("key", "T", ("tokens", "kv_heads", "head_dim")),
        Parameter("value", "T", ("tokens", "kv_heads", "value_dim")),
        Parameter("key_cache", "C", ("blocks", "kv_heads", "head_dim", "block_size"), "dimension-major inside a block"),
        Parameter("value_cache", "C", ("blocks", "kv_heads", "block_size", "value_dim")),
        Parameter("slot_mapping", "tensor(int32)", ("tokens",), "block * block_size + offset, -1 = do not store"),
        Parameter("block_table", "tensor(int32)", ("sequences", "max_blocks"), "-1 = unused"),
        Parameter("query_start", "tensor(int32)", ("sequences + 1",), "cumulative number of tokens"),
        Parameter("context_lens", "tensor(int32)", ("sequences",), "tokens in the cache before this step"),
        *_HEAD_INPUTS,
    ),
    outputs=(
        Parameter("output", "T", ("tokens", "q_heads", "value_dim")),
        Parameter(
            "key_cache_out",
            "C",
            ("blocks", "kv_heads", "head_dim", "block_size"),
            "key_cache with the new keys stored",
            alias="key_cache",
        ),
        Parameter(
            "value_cache_out",
            "C",
            ("blocks", "kv_heads", "block_size", "value_dim"),
            "value_cache with the new values stored",
            alias="value_cache",
        ),
        Parameter("stats", "tensor(float)", ("tokens", "q_heads", "stats_columns"), _STATISTICS),
    ),
    beside=(
        Parameter(
            "key_scale",
            "tensor(float)",
            ("blocks", "kv_heads"),
            "for int8 and fp8 caches: a key is scale * number",
            optional=True,
        ),
        Parameter(
            "value_scale",
            "tensor(float)",
            ("blocks", "kv_heads"),
            "for int8 and fp8 caches: a value is scale * number",
            optional=True,
        ),
        Parameter(
            "key_screen",
            "tensor(int8)",
            ("blocks", "kv_heads", "screen_bytes"),
            "for entmax over a cache of floats: the keys in 8 bits, from which kernels know which keys surely have "
            "weight 0; screen_bytes = block_size * (head_dim rounded up to a multiple of 4, plus 8); a block of zeros "
            "has no screen, and 0 blocks mean no screen at all",
            optional=True,
            flag="screened",
        ),
    ),
    constants=(
        Parameter(
            "key_shift",
            "tensor(float)",
            ("kv_heads", "head_dim"),
            "the vector that is subtracted from a head's keys before key_screen stores them",
            optional=True,
        ),
    ),
    mixed=True,
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
        Parameter("query", "T", ("batch", "q_heads", "queries", "head_dim"), "positions applied"),
        Parameter("key", "T", ("batch", "kv_heads", "new_keys", "head_dim"), "kv_heads divides q_heads"),
        Parameter("value", "T", ("batch", "kv_heads", "new_keys", "value_dim")),
        Parameter(
            "past_key",
            "C",
            ("batch", "kv_heads", "capacity", "head_dim"),
            "capacity is the number of past keys, or of the places of a shared buffer",
            optional=True,
            flag="has_past",
        ),
        Parameter("past_value", "C", ("batch", "kv_heads", "capacity", "value_dim"), "with past_key", optional=True),
        Parameter(
            "past_lens", "tensor(int32)", ("batch",), "filled places of a shared buffer", optional=True, flag="shared"
        ),
        Parameter("total_lens", "tensor(int32)", ("batch",), "keys that are not padding, past included", optional=True),
        *_HEAD_INPUTS,
    ),
    outputs=(
        Parameter("output", "T", ("batch", "q_heads", "queries", "value_dim")),
        Parameter(
            "present_key",
            "C",
            ("batch", "kv_heads", "slots", "head_dim"),
            "slots is past + new_keys, or capacity",
            optional=True,
            flag="has_presents",
        ),
        Parameter("present_value", "C", ("batch", "kv_heads", "slots", "value_dim"), optional=True),
        Parameter(
            "stats", "tensor(float)", ("batch", "q_heads", "queries", "stats_columns"), _STATISTICS, optional=True
        ),
    ),
)

# SharpAttention under its old name, which models exported before the rename still have. The op was renamed because
# tools that match nodes by name alone (ONNX Runtime's quantizer, TensorRT's parser) took it for Microsoft's or ONNX's
# Attention.
OLD_ATTENTION = replace(ATTENTION, name="Attention")

OPS = (PAGED_ATTENTION, ATTENTION, OLD_ATTENTION)
