"""A checkpoint that was read, whatever it was read from."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sharp.exporter.checkpoints.decoder import Decoder
from sharp.exporter.checkpoints.uncached_model import UncachedModel
from sharp.plugins.errors import InputError, NotFoundError
from sharp.plugins.manifest import Sampling

KINDS = (
    "a Hugging Face folder (config.json and safetensors), a .gguf file, a .pt or .safetensors file of Sharp's own, "
    "or a .pt2 file of torch.export.save"
)


@dataclass(frozen=True)
class Source:
    """A checkpoint that was read: the model, and what goes beside it into the model folder.

    `original` is the checkpoint under the norm that it was trained with: `model` itself where that is the norm.
    `write_config` writes transformers' `config.json`, which optimum asks for.
    """

    name: str
    architecture: str
    sha256: str
    model: Decoder | UncachedModel
    original: Decoder | UncachedModel
    write_tokenizer: Callable[[Path], object] | None
    write_config: Callable[[Path], object] | None = None
    task: str | None = None
    task_parameters: Mapping[str, Any] = field(default_factory=dict)  # where the training differed from its defaults
    sampling: Sampling = field(default_factory=Sampling)
    unused_weights: tuple[str, ...] = ()  # names in the checkpoint that the model has no place for
    no_cache: str | None = None  # why a model that is no decoder cannot have one, where there is more to say

    @property
    def trained(self) -> bool:
        """The checkpoint was trained with the norm that the model now has."""
        return self.original is self.model

    @property
    def learned(self) -> bool:
        """The parameters of the model's norm are the checkpoint's, even where some heads have another norm."""
        return self.original.config.norm == self.model.config.norm

    @property
    def reads_text(self) -> bool:
        """It is a decoder and has a tokenizer."""
        return isinstance(self.model, Decoder) and self.write_tokenizer is not None

    def save_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer, which there is, into `folder`.

        Raises:
            OSError: it cannot be written.
        """
        assert self.write_tokenizer is not None
        try:
            self.write_tokenizer(folder)
        except Exception as error:  # tokenizers raises nothing narrower
            raise OSError(f"tokenizer.json: {error}") from error


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
            f"{path} is no Hugging Face folder and no .gguf file, which is what sharp adapt takes; a model of your own "
            "is trained with sharp.models.normalized_attention in it, see docs/your-own-model.md"
        )


def sha256(files: Iterable[Path]) -> str:
    """The SHA-256 of the files' contents, one after the other, in hexadecimal: it ties a folder to its checkpoint."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()
