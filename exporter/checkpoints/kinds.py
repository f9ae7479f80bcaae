"""What a checkpoint may be."""

from pathlib import Path

from sharp.plugins.errors import NotFoundError

KINDS = (
    "a Hugging Face folder (config.json and safetensors), a .gguf file, or a .pt or .safetensors file of Sharp's own"
)


def check_exists(path: Path) -> None:
    """Raises NotFoundError if nothing is at `path`."""
    if not path.exists():
        raise NotFoundError(f"{path} does not exist; give {KINDS}")
