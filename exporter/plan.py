"""`sharp-export --dry-run`: what an export would write, and the memory that it would take."""

from dataclasses import dataclass

from torch import nn
from transformers.pytorch_utils import Conv1D

from sharp.exporter.checkpoints.decoder import Decoder
from sharp.exporter.checkpoints.source import Source
from sharp.exporter.forms.form import Form
from sharp.exporter.graph.graph_options import GraphOptions
from sharp.exporter.graph.quantization import choose_packings
from sharp.exporter.programs.matrix_products import product_shapes
from sharp.exporter.programs.program import Program
from sharp.exporter.verification.parked_weights import LEAST_BYTES
from sharp.models.config import SharpConfig
from sharp.plugins.cache_tensors import cache_tensors
from sharp.plugins.manifest import NormParameter, Target

BYTES: dict[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}

# Measured on 2026-11-21: exporting a model of 12 MB takes 540 MB, SmolLM2-135M (GGUF, 538 MB in float32) 1,977 MB. The
# copies are the model in PyTorch, ONNX Runtime's, and the one that ONNX Runtime packs for its matrix products. Of a
# large model one is there at a time, and what is read of its file: 1.1 billion parameters (4,417 MB) take 7,083 MB.
BASE_BYTES = 510_000_000  # Python with torch and transformers
COPIES, COPIES_OF_LARGE = 2.75, 1.5


@dataclass(frozen=True)
class Plan:
    """What would be exported; sizes are in bytes, `memory_bytes` is an estimate of the export's own peak."""

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
) -> Plan:
    """What exporting `source` in `form` would do."""
    config: SharpConfig = form.config
    tracing = form.trace()
    weights = sum(parameter.numel() for parameter in source.model.parameters())  # each once, tied ones too
    cached = form.cache.form != "none"
    return Plan(
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


def _memory_bytes(weights: int) -> int:
    return BASE_BYTES + int((COPIES_OF_LARGE if weights >= LEAST_BYTES else COPIES) * weights)


def _cache_bytes(form: Form) -> float:
    config = form.config
    if form.cache.form == "contiguous":
        return 2 * config.layers * config.kv_heads * config.head_dim * BYTES["float32"]
    tensors = cache_tensors(form.cache, config.layers, config.kv_heads, config.head_dim, config.head_dim)
    return sum(tensor.block_bytes for tensor in tensors) / form.cache.block_size


def _weight_bytes(model: nn.Module, options: GraphOptions, config: SharpConfig) -> int:
    parameters = {id(parameter): parameter for parameter in model.parameters()}  # each once, tied ones too
    if options.quantize is None:
        return sum(parameter.numel() for parameter in parameters.values()) * BYTES[options.dtype]
    products: dict[int, nn.Module | nn.Parameter] = {
        id(one.weight): one for one in model.modules() if isinstance(one, nn.Linear | Conv1D)
    }
    shapes = [
        (one.weight.shape[0], one.weight.shape[1]) if isinstance(one, Conv1D) else (one.in_features, one.out_features)
        for one in products.values()
        if isinstance(one, nn.Linear | Conv1D)
    ]
    for one in model.modules():
        if isinstance(one, Program):
            products |= {key: parameters[key] for key in product_shapes(one)}
            shapes += product_shapes(one).values()
    packed = zip(choose_packings(shapes, options.quantize, config), shapes, strict=True)
    rest = sum(parameter.numel() for key, parameter in parameters.items() if key not in products)
    size = BYTES[options.dtype]
    return sum(packing.bytes_of(*shape, size) for packing, shape in packed) + rest * size
