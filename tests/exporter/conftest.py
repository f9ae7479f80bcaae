from pathlib import Path

import onnx
import pytest
import torch
from click.testing import CliRunner, Result

from sharp.core.checksums import update_sums
from sharp.exporter.cli import export
from sharp.models.causal_lm import SharpForCausalLM
from sharp.models.checkpoint import save_checkpoint
from sharp.models.config import SharpConfig
from sharp.plugins.op.schema import ATTENTION
from tests.exporting import one_registry, one_trace, quick_tracing

__all__ = ["one_registry", "one_trace", "quick_tracing"]


def tiny_model(norm: str, positions: str = "rope", **changes: object) -> SharpForCausalLM:
    """Return a random model with grouped queries whose learned parameters are off their initial values.

    The model has one layer, because each further layer takes as long to trace. The tests' Hugging Face models have two.
    """
    torch.manual_seed(0)
    sizes = {"vocab_size": 257, "hidden_size": 48, "intermediate_size": 64, "layers": 1, "q_heads": 6, "kv_heads": 2}
    options = {"head_dim": 8, "norm": norm, "positions": positions, "tokenizer": "bytes"}
    config = SharpConfig(**{**sizes, **options, **changes})  # type: ignore[arg-type]
    model = SharpForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.05))
    return model.eval()


@pytest.fixture
def checkpoint(tmp_path: Path):
    def save(norm: str, positions: str = "rope", suffix: str = ".safetensors", **changes: object) -> Path:
        path = tmp_path / f"tiny{suffix}"
        save_checkpoint(path, tiny_model(norm, positions, **changes), dtype=torch.float32)
        return path

    return save


@pytest.fixture
def sharp_export():
    def run(*arguments: object) -> Result:
        return CliRunner().invoke(export, [str(argument) for argument in arguments], prog_name="sharp-export")

    return run


def give_the_old_name(folder: Path) -> None:
    """Rename the op of an exported folder to `Attention`, its name before `SharpAttention`."""
    path = folder / "model.onnx"
    model = onnx.load(path, load_external_data=False)
    for node in model.graph.node:
        node.op_type = "Attention" if node.op_type == ATTENTION.name else node.op_type
    for function in model.functions:
        function.name = "Attention" if function.name == ATTENTION.name else function.name
    onnx.save(model, path)
    update_sums(folder, [path])
