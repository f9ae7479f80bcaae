"""The contract of `ai.sharp::PagedAttention` version 1: names, shapes, attributes and their defaults."""

import onnx
from onnx import defs

DOMAIN = "ai.sharp"
VERSION = 1
PAGED_ATTENTION = "PagedAttention"

NORMALIZERS = ("softmax", "ssa", "adaptive_softmax", "entmax", "sigmoid", "relu", "relu2")

ICML2025_COEFFICIENTS = (-0.037, 0.481, -2.3, 4.917, -1.791)
"""Inverse temperature as a polynomial of the entropy in nats, highest power first (ICML 2025, Fig. 4)."""

# The published polynomials by name: ICML 2025 Fig. 4, and the earlier arXiv version of the same paper.
TEMPERATURE_PRESETS: dict[str, tuple[float, ...]] = {
    "icml2025": ICML2025_COEFFICIENTS,
    "arxiv2024": (-0.04, 0.48, -2.3, 4.92, -1.79),
}

DEFAULT_ALPHA = 1.5
DEFAULT_ENTROPY_THRESHOLD = 0.5

INPUTS = (
    "query",
    "key",
    "value",
    "key_cache",
    "value_cache",
    "slot_mapping",
    "block_table",
    "query_start",
    "context_lens",
    "head_params",
    "alibi_slopes",
    "collect_stats",
)
REQUIRED_INPUTS = 9
ABSENT = "ai.sharp.absent"
"""Initializer float [0] that stands for an optional input that is left out; every kernel takes an empty tensor so."""

OUTPUTS = ("output", "key_cache_out", "value_cache_out", "stats")

SCALES = ("key_scale", "value_scale")
"""What an int8 cache needs besides: a number is scale * integer, with one scale per block and head."""

BESIDE_CACHE = (*SCALES, "key_norm")
"""Optional inputs after `INPUTS`, and with `_out` optional outputs after `OUTPUTS`; in place like the caches.

The kernel library declares these outputs; the schema here does not, because torch's exporter would give every node all
of them and a function body has only `OUTPUTS`.
"""

REQUIRED_ATTRIBUTES = ("normalizer", "scale")
ATTRIBUTE_DEFAULTS: dict[str, float | int | str | tuple[float, ...]] = {
    "alpha": DEFAULT_ALPHA,
    "temperature_coefficients": ICML2025_COEFFICIENTS,
    "entropy_threshold": DEFAULT_ENTROPY_THRESHOLD,
    "softcap": 0.0,
    "window": -1,
    "causal": 1,
    # TensorRT's parser looks for a plugin only on nodes that carry these two.
    "plugin_namespace": "",
    "plugin_version": "1",
}

_INPUT_DOCS = {
    "query": "[tokens, q_heads, head_dim], tokens of all sequences packed, positions already applied",
    "key": "[tokens, kv_heads, head_dim]",
    "value": "[tokens, kv_heads, value_dim]",
    "key_cache": "[blocks, kv_heads, head_dim, block_size], dimension-major inside a block",
    "value_cache": "[blocks, kv_heads, block_size, value_dim]",
    "slot_mapping": "[tokens], block * block_size + offset, -1 = do not store",
    "block_table": "[sequences, max_blocks], -1 = unused",
    "query_start": "[sequences + 1], cumulative number of tokens",
    "context_lens": "[sequences], tokens in the cache before this step",
    "head_params": "[q_heads, P], per-head parameters of the normalizer (ssa: b, n)",
    "alibi_slopes": "[q_heads], the bias of key j for position p is slope * (j - p)",
    "key_scale": "[blocks, kv_heads], an int8 cache's; a key is scale * integer",
    "value_scale": "[blocks, kv_heads], an int8 cache's; a value is scale * integer",
    "key_norm": "[blocks, kv_heads], no key of the block is longer; lets entmax with ALiBi skip far keys unread",
    "collect_stats": "scalar; absent or false: `stats` is all zeros and costs nothing",
}
_INPUT_TYPES = {
    "key_cache": "C",
    "value_cache": "C",
    "slot_mapping": "tensor(int32)",
    "block_table": "tensor(int32)",
    "query_start": "tensor(int32)",
    "context_lens": "tensor(int32)",
    "head_params": "tensor(float)",
    "alibi_slopes": "tensor(float)",
    "collect_stats": "tensor(bool)",
    "key_scale": "tensor(float)",
    "value_scale": "tensor(float)",
    "key_norm": "tensor(float)",
}
_OUTPUT_DOCS = {
    "output": "[tokens, q_heads, value_dim]",
    "key_cache_out": "key_cache with the new keys stored",
    "value_cache_out": "value_cache with the new values stored",
    "stats": "[tokens, q_heads, 4]: entropy (nats), support, inverse temperature, logit spread",
}
_OUTPUT_TYPES = {"output": "T", "key_cache_out": "C", "value_cache_out": "C", "stats": "tensor(float)"}


def register_schema() -> None:
    """Make `ai.sharp::PagedAttention` known to onnx in this process; calling it again changes nothing.

    The checker, shape inference, onnxscript and `torch.onnx.export` find the op's attributes through it.
    """
    if not defs.has(PAGED_ATTENTION, domain=DOMAIN):
        defs.register_schema(_schema())


def attribute_defaults() -> list[onnx.AttributeProto]:
    """The optional attributes with their default values, as a schema or a function declares them."""
    return [onnx.helper.make_attribute(name, value) for name, value in ATTRIBUTE_DEFAULTS.items()]


def _schema() -> defs.OpSchema:
    parameter, option = defs.OpSchema.FormalParameter, defs.OpSchema.FormalParameterOption
    inputs = [
        parameter(
            name,
            _INPUT_TYPES.get(name, "T"),
            _INPUT_DOCS[name],
            param_option=option.Single if position < REQUIRED_INPUTS else option.Optional,
        )
        for position, name in enumerate((*INPUTS, *BESIDE_CACHE))
    ]
    outputs = [parameter(name, _OUTPUT_TYPES[name], _OUTPUT_DOCS[name]) for name in OUTPUTS]
    attribute = defs.OpSchema.Attribute
    required = [
        attribute("normalizer", defs.OpSchema.AttrType.STRING, " | ".join(NORMALIZERS)),
        attribute("scale", defs.OpSchema.AttrType.FLOAT, "factor of query . key"),
    ]
    floats = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"]
    return defs.OpSchema(
        PAGED_ATTENTION,
        DOMAIN,
        VERSION,
        "Attention over a paged key-value cache, with the normalizer as an attribute.",
        inputs=inputs,
        outputs=outputs,
        type_constraints=[
            ("T", floats, "query, key, value and output"),
            ("C", [*floats, "tensor(int8)"], "the cache"),
        ],
        attributes=required + [attribute(default.name, default) for default in attribute_defaults()],
    )
