"""The plan of an export (`sharp-export --dry-run`): the files that it would write and the memory that it would take."""

from dataclasses import dataclass

from torch import nn
from transformers.pytorch_utils import Conv1D

from sharp.core.manifest import NormParameter, Target
from sharp.exporter.forms.form import Form
from sharp.exporter.graph.graph_options import GraphOptions
from sharp.exporter.graph.quantization import choose_packings
from sharp.exporter.programs.matrix_products import product_shapes
from sharp.exporter.programs.program import Program
from sharp.exporter.sources.decoder import Decoder
from sharp.exporter.sources.source import Source
from sharp.exporter.verification.parked_weights import LEAST_BYTES
from sharp.models.config import SharpConfig
from sharp.plugins.op.cache_tensors import cache_tensors

BYTES: dict[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}

# Peak memory of exports, measured on 2026-11-21: 540 MB for a model of 12 MB, 1,977 MB for SmolLM2-135M (GGUF, 538 MB
# in float32), and 7,083 MB for 1.1 billion parameters (4,417 MB). A model has three copies: in PyTorch, in ONNX
# Runtime, and packed for ONNX Runtime's matrix products. Of a large model, only one copy is in memory at a time, and
# the part of its file that is being read.
BASE_BYTES = 510_000_000  # Python with torch and transformers
COPIES, COPIES_OF_LARGE = 2.75, 1.5


@dataclass(frozen=True)
class ExportPlan:
    """The plan of an export.

    Names that end in `_bytes` are sizes in bytes. `weights` counts the numbers in the weights, tied ones once.
    `memory_bytes` is an estimate of the export's own peak. `cache_bytes_per_token` is 0 without a cache. `inputs` maps
    the name of each input to its shape, in which a text is a dimension that varies.
    """

    name: str
    architecture: str
    kind: str
    norm: str
    trained: bool
    parameters: tuple[NormParameter, ...]
    cache: str
    target: Target
    dtype: str
    quantization: str | None
    cache_dtype: str
    block_size: int
    opset: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    inputs: dict[str, tuple[str | int, ...]]
    outputs: tuple[str, ...]
    weights: int
    weight_bytes: int
    cache_bytes_per_token: float
    memory_bytes: int


def make_plan(
    source: Source, form: Form, options: GraphOptions, target: Target, parameters: tuple[NormParameter, ...]
) -> ExportPlan:
    """Return the plan of exporting `source` in `form`. The model is traced, but not lowered or written.

    `parameters` are those of the norm, for the plan.
    """
    config: SharpConfig = form.config
    tracing = form.trace()
    weights = sum(parameter.numel() for parameter in source.model.parameters())  # tied parameters count once
    cached = form.cache.form != "none"
    return ExportPlan(
        name=source.name,
        architecture=source.architecture,
        kind=form.kind,
        norm=source.model.norm_name if isinstance(source.model, Decoder) else config.norm,
        trained=source.trained,
        parameters=parameters,
        cache=form.cache.form,
        target=target,
        dtype=options.dtype,
        quantization=options.quantize,
        cache_dtype=form.cache.dtype,
        block_size=form.cache.block_size,
        opset=options.opset,
        layers=config.layers,
        q_heads=config.q_heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        max_context=options.context_of(config, form.positions),
        inputs=dict(tracing.inputs) | {tensor.name: ("blocks", *tensor.block_shape) for tensor in tracing.beside},
        outputs=tracing.outputs + tuple(tensor.updated_name for tensor in tracing.beside),
        weights=weights,
        weight_bytes=_weight_bytes(source.model, options, config),
        cache_bytes_per_token=_cache_bytes(form) if cached else 0.0,
        memory_bytes=_memory_bytes(weights * BYTES["float32"]),
    )


def disk_bytes(model: nn.Module, options: GraphOptions, config: SharpConfig) -> int:
    """Return the bytes that an export of `model` takes on the disk: its file, and weights that are parked there."""
    in_memory = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return _weight_bytes(model, options, config) + (in_memory if in_memory >= LEAST_BYTES else 0)


def _memory_bytes(weights: int) -> int:
    """Return the estimated memory in bytes of an export whose weights have `weights` bytes."""
    return BASE_BYTES + int((COPIES_OF_LARGE if weights >= LEAST_BYTES else COPIES) * weights)


def _cache_bytes(form: Form) -> float:
    """Return the bytes that one token takes in the cache of all layers."""
    config = form.config
    if form.cache.form == "contiguous":
        return config.layers * config.kv_heads * (config.head_dim + config.value_dim) * BYTES["float32"]
    tensors = cache_tensors(form.cache, config.layers, config.kv_heads, config.head_dim, config.value_dim)
    return sum(tensor.block_bytes for tensor in tensors) / form.cache.block_size


def _weight_bytes(model: nn.Module, options: GraphOptions, config: SharpConfig) -> int:
    """Return the bytes of the weights as written: in the export's dtype or quantized. Tied weights count once."""
    parameters = {id(parameter): parameter for parameter in model.parameters()}  # tied parameters are there once
    if options.quantize is None:
        return sum(parameter.numel() for parameter in parameters.values()) * BYTES[options.dtype]
    products: dict[int, nn.Module | nn.Parameter] = {
        id(module.weight): module for module in model.modules() if isinstance(module, nn.Linear | Conv1D)
    }
    shapes = [
        (product.weight.shape[0], product.weight.shape[1])
        if isinstance(product, Conv1D)
        else (product.in_features, product.out_features)
        for product in products.values()
        if isinstance(product, nn.Linear | Conv1D)
    ]
    for module in model.modules():
        if isinstance(module, Program):
            products |= {key: parameters[key] for key in product_shapes(module)}
            shapes += product_shapes(module).values()
    packed = zip(choose_packings(shapes, options.quantize, config), shapes, strict=True)
    rest = sum(parameter.numel() for key, parameter in parameters.items() if key not in products)
    size = BYTES[options.dtype]
    return sum(packing.bytes_of(*shape, size) for packing, shape in packed) + rest * size
