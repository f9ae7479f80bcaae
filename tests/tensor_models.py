"""Small random models that read sets or numbers, and their model folders."""

from dataclasses import replace
from pathlib import Path

import torch
from click.testing import CliRunner

from sharp.core.manifest import PositionScheme
from sharp.models.checkpoint import Model, save_checkpoint
from sharp.models.config import SharpConfig
from sharp.models.max_retrieval import MaxRetrieval, MaxRetrievalConfig
from sharp.models.number_sequence import SharpForNumbers

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
    """Add noise to the parameters of `model`, so that none has its initial value, and return `model`."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * (0.3 if parameter.dim() == 1 else 0.05))
    return model.eval()


def set_model(norm: str = "softmax") -> MaxRetrieval:
    """Return a model that sorts sets of items into ten classes."""
    torch.manual_seed(0)
    return shaken(MaxRetrieval(MaxRetrievalConfig(norm=norm, hidden_size=24)))


def numbers_model(norm: str = "softmax", positions: PositionScheme = "nape") -> SharpForNumbers:
    """Return a model that reads a sequence of numbers and has two outputs at each."""
    torch.manual_seed(0)
    return shaken(SharpForNumbers(replace(NUMBERS, norm=norm, positions=positions)))


def export_tensor_model(folder: Path, model: Model, *options: str, task: str | None = None) -> Path:
    """Save the checkpoint of `model` in `folder`, export it to `folder`/model, and return that model folder."""
    from sharp.exporter.cli import export

    save_checkpoint(folder / "checkpoint.safetensors", model, task=task)
    arguments = ["--norm", model.config.norm, "--cache", "none", "-o", str(folder / "model"), *options]
    result = CliRunner().invoke(export, [str(folder / "checkpoint.safetensors"), *arguments])
    assert result.exit_code == 0, result.output
    return folder / "model"
