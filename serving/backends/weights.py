"""Copies of a model's files in memory, so that the weights that run are the weights that were verified.

ONNX Runtime maps the file of the weights into memory. A program that writes into the file later changes the weights
that run, and if it truncates the file, the operating system ends the server (SIGBUS). So the files are copied into
memory if there is room, and the copies are compared with their SHA-256. Otherwise the files are mapped, and
`engine.mapped_files` watches them for changes.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sharp.core.errors import InputError
from sharp.core.external_data import external_files
from sharp.core.machine import available_memory
from sharp.core.manifest import Manifest

# ONNX Runtime copies the weights that it is given, so two copies exist while a model is loaded. The third is left for
# the key-value cache.
COPIES = 3


@dataclass(frozen=True)
class CopiedModel:
    """The content of a model file, and of its external data files by the names in the model."""

    model: bytes
    external: dict[str, bytes]

    def add_to(self, options: Any) -> None:
        """Let a session with these ONNX Runtime `SessionOptions` take external data from here, not from its files."""
        if self.external:
            sizes = [len(content) for content in self.external.values()]
            options.add_external_initializers_from_files_in_memory([*self.external], [*self.external.values()], sizes)


def chosen_weights(folder: Path, manifest: Manifest, weights: str) -> str:
    """Return "copy" or "map" for the setting `weights`; "auto" means "copy" if the available memory has room."""
    if weights != "auto":
        return weights
    size = sum((folder / name).stat().st_size for name in model_files(folder, manifest))
    return "copy" if COPIES * size <= available_memory() else "map"


def copied_model(folder: Path, manifest: Manifest, *, verify: bool) -> CopiedModel:
    """Read the files of a model into memory. With `verify`, compare the content with its SHA-256.

    Raises:
        InputError: a file cannot be read, or has changed since `verify_files` saw it.
    """
    names = model_files(folder, manifest)
    try:
        contents = {name: (folder / name).read_bytes() for name in names}
    except OSError as error:
        raise InputError(f"{folder} cannot be read: {error.strerror}") from error
    for name, content in contents.items():
        expected = manifest.files.get(name) if verify else None
        if expected is not None and hashlib.sha256(content).hexdigest() != expected.sha256:
            raise InputError(f"{folder / name} has changed while the model was loaded; copy or export the model again")
    return CopiedModel(contents.pop(manifest.model_file), contents)


def model_files(folder: Path, manifest: Manifest) -> tuple[str, ...]:
    """Return the names of the model file and of its external data files."""
    return (manifest.model_file, *external_files(folder, manifest.model_file))
