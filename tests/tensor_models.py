"""Small random models of sets and of numbers, and their folders."""

from dataclasses import replace
from pathlib import Path

import torch
from click.testing import CliRunner

from sharp.models.checkpoint import Model, save_checkpoint
from sharp.models.config import SharpConfig
from sharp.models.max_retrieval import MaxRetrieval, MaxRetrievalConfig
from sharp.models.number_sequence import SharpForNumbers
from sharp.plugins.manifest import PositionScheme

NUMBERS = SharpConfig(
    vocab_size=2,
    hidden_size=32,
    intermediate_size=48,
    layers=2,
    q_heads=4,
    kv_heads=2,
    head_dim=8,
    norm="softmax",
    positions="nape",
    trained_context=40,
    max_context=200,
    tie_embeddings=False,
)


def shaken(model: Model) -> Model:
    """`model` with its parameters away from their start."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * (0.3 if parameter.dim() == 1 else 0.05))
    return model.eval()


def set_model(norm: str = "softmax") -> MaxRetrieval:
    """A model of sets of items with ten classes."""
    torch.manual_seed(0)
    return shaken(MaxRetrieval(MaxRetrievalConfig(norm=norm, hidden_size=24)))


def numbers_model(norm: str = "softmax", positions: PositionScheme = "nape") -> SharpForNumbers:
    """A model of numbers with two outputs at each."""
    torch.manual_seed(0)
    return shaken(SharpForNumbers(replace(NUMBERS, norm=norm, positions=positions)))


def export_tensor_model(folder: Path, model: Model, *options: str, task: str | None = None) -> Path:
    """The model folder, made in `folder`, which has the checkpoint too."""
    from sharp.exporter.cli import export

    save_checkpoint(folder / "checkpoint.safetensors", model, task=task)
    arguments = ["--norm", model.config.norm, "--cache", "none", "-o", str(folder / "model"), *options]
    result = CliRunner().invoke(export, [str(folder / "checkpoint.safetensors"), *arguments])
    assert result.exit_code == 0, result.output
    return folder / "model"
