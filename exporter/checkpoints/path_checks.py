"""Checks of a checkpoint's path, which commands run before they import torch, because that import takes seconds."""

from pathlib import Path

from sharp.core import hub
from sharp.core.errors import InputError, NotFoundError
from sharp.core.machine import available_memory
from sharp.core.manifest import MANIFEST_FILE
from sharp.exporter.checkpoints.weight_files import declared_weights
from sharp.exporter.programs.state_dicts import whose

KINDS = (
    "a Hugging Face folder (config.json and safetensors), a .gguf file, a .pt or .safetensors file of Sharp's own, "
    "a .pt2 file of torch.export.save, or FILE.py:CLASS with --weights"
)
INSPECTED = (
    "a model folder (of sharp-export), a .pt or .safetensors file of Sharp's own, a .pt2 file of torch.export.save, a "
    "Hugging Face folder or a .gguf file"
)
SUFFIXES = (".gguf", ".pt", ".pt2", ".safetensors")
TORCH_BYTES = 500_000_000  # memory of Python with torch and transformers, as in sharp.exporter.plan


def check_exists(path: Path, kinds: str = KINDS) -> None:
    """Check that `path` is a file or a folder; messages say which `kinds` of checkpoint to give.

    Raises:
        NotFoundError: nothing is at `path`.
        InputError: `path` is a pipe, a device or a socket, so that reading might never end.
    """
    if not path.exists():
        fetch = ""
        if hub.is_hub_id(str(path)):
            fetch = f". A model of this name on the Hugging Face Hub is fetched with: {hub.download_command(str(path))}"
        raise NotFoundError(f"{path} does not exist; give {kinds}{fetch}")
    if not (path.is_file() or path.is_dir()):
        raise InputError(f"{path} is no regular file and no folder; give {kinds}")


def check_checkpoint(path: Path, kinds: str = KINDS) -> None:
    """Check that a checkpoint is there, that its weights are whole, and that they fit into memory.

    Only the headers of GGUF and safetensors files are read. Other formats, and damage of other kinds, are left to their
    readers.

    Raises:
        NotFoundError: nothing is at `path`.
        InputError: `path` is no checkpoint, a file is cut off or has no weights at all, or the weights take more memory
            than there is.
    """
    check_exists(path, kinds)
    if path.is_dir() and not (path / "config.json").is_file():
        if (path / MANIFEST_FILE).exists():
            raise InputError(
                f"{path} is a model folder of sharp-export; serve it (sharp serve {path}), or give the checkpoint that "
                "it was exported from"
            )
        if files := sorted(path.glob("*.gguf")):
            raise InputError(f"{path} has no config.json; give its GGUF file, {files[0]}")
        raise InputError(whose(path) or f"{path} has no config.json; give {kinds}")
    if path.is_file() and path.suffix not in SUFFIXES:
        raise InputError(whose(path) or f"{path} is not a checkpoint that Sharp can read; give {kinds}")
    check_fits(path)


def check_fits(path: Path) -> None:
    """Check that the weights of a checkpoint are whole and fit into memory in float32, in which they are read.

    Raises:
        InputError: a file is cut off or no weights at all, or the weights take more memory than there is.
    """
    weights = declared_weights(path)
    needed, available = 4 * weights + TORCH_BYTES, available_memory(swap=True)
    if needed > available:
        raise InputError(
            f"{path} has {weights:,} weights, which take {needed / 1e9:.1f} GB of memory in float32, and "
            f"{available / 1e9:.1f} GB are free; choose a smaller model, or a machine with more memory"
        )


def check_adaptable(path: Path) -> None:
    """Check that `path` is a checkpoint that `sharp adapt` takes: a folder or a GGUF file.

    Raises:
        NotFoundError: nothing is at `path`.
        InputError: `path` is another file, is cut off, or its weights take more memory than there is.
    """
    check_exists(path, "a Hugging Face folder or a .gguf file")
    if not path.is_dir() and not (path.is_file() and path.suffix == ".gguf"):
        raise InputError(
            f"{path} is no Hugging Face folder and no .gguf file, which is what sharp adapt takes; for a module of "
            "your own there is sharp.adapt_module in Python, see sharp docs your-own-model"
        )
    check_fits(path)
