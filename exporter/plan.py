"""`sharp-export --dry-run`: what an export would write, and the memory that it would take."""

from dataclasses import dataclass

from sharp.exporter import lowering
from sharp.exporter.forms import Form
from sharp.exporter.source import Source
from sharp.models.config import SharpConfig
from sharp.plugins.manifest import NormParameter, Target

BYTES = 4  # of a float32

# Measured on 2026-11-21: exporting a model of 12 MB takes 540 MB, SmolLM2-135M (GGUF, 538 MB in float32) 1,977 MB. The
# copies are the model in PyTorch, ONNX Runtime's, and the one that ONNX Runtime packs for its matrix products.
BASE_BYTES = 510_000_000  # Python with torch and transformers
COPIES = 2.75


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
    cache_bytes_per_token: int
    memory_bytes: int


def make_plan(source: Source, form: Form, target: Target, parameters: tuple[NormParameter, ...]) -> Plan:
    """What exporting `source` in `form` would do."""
    config: SharpConfig = form.config
    tracing = form.trace()
    weights = sum(parameter.numel() for parameter in source.model.parameters())  # each once, tied ones too
    cached = form.cache.form != "none"
    return Plan(
        name=source.name,
        architecture=source.architecture,
        kind=form.kind,
        norm=config.norm,
        trained=source.trained,
        parameters=parameters,
        cache=form.cache.form,
        target=target,
        opset=lowering.OPSET,
        layers=config.layers,
        q_heads=config.q_heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        max_context=config.max_context,
        inputs=dict(tracing.inputs),
        outputs=tracing.outputs,
        weights=weights,
        weight_bytes=weights * BYTES,
        cache_bytes_per_token=2 * config.layers * config.kv_heads * config.head_dim * BYTES if cached else 0,
        memory_bytes=BASE_BYTES + int(COPIES * weights * BYTES),
    )
