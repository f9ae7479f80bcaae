"""What commands check of a checkpoint's path before they import torch, which takes seconds."""

from pathlib import Path

from sharp.plugins.errors import InputError, NotFoundError

KINDS = (
    "a Hugging Face folder (config.json and safetensors), a .gguf file, a .pt or .safetensors file of Sharp's own, "
    "or a .pt2 file of torch.export.save"
)


def check_exists(path: Path, kinds: str = KINDS) -> None:
    """What can be read at all; `kinds` says what to give.

    Raises:
        NotFoundError: nothing is at `path`.
        InputError: it is a pipe, a device or a socket, which need not end.
    """
    if not path.exists():
        raise NotFoundError(f"{path} does not exist; give {kinds}")
    if not (path.is_file() or path.is_dir()):
        raise InputError(f"{path} is no regular file and no folder; give {kinds}")


def check_adaptable(path: Path) -> None:
    """What `sharp adapt` takes.

    Raises:
        NotFoundError: nothing is at `path`.
        InputError: it is a file, and none of GGUF.
    """
    if not path.exists():
        raise NotFoundError(f"{path} does not exist; give a Hugging Face folder or a .gguf file")
    if not path.is_dir() and not (path.is_file() and path.suffix == ".gguf"):
        raise InputError(
            f"{path} is no Hugging Face folder and no .gguf file, which is what sharp adapt takes; for a module of "
            "your own there is sharp.adapt_module in Python, see docs/your-own-model.md"
        )
