"""`MappedFiles`: files of weights that are mapped into memory while a model is served, and must not change."""

import logging
from pathlib import Path

from sharp.core.checksums import damaged_files
from sharp.core.errors import SharpError
from sharp.core.file_watch import signature, watch
from sharp.core.manifest import Manifest, read_manifest
from sharp.serving.backends.weights import chosen_weights, model_files

logger = logging.getLogger(__name__)


def watch_mapped_files(path: Path, weights: str) -> "MappedFiles | None":
    """Return a watch of the files of the model folder `path`; None if the setting `weights` copies them into memory.

    Raises:
        NotFoundError: there is no model folder.
        InputError: its manifest cannot be used.
    """
    manifest = read_manifest(path)
    return MappedFiles(path, manifest) if chosen_weights(path, manifest, weights) == "map" else None


class MappedFiles:
    """A watch of the mapped files of a model. `problem` says that the files have changed; None if they have not."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.problem: str | None = None
        self.watched = tuple(folder / name for name in model_files(folder, manifest))
        self._folder = folder
        self._sums = bool(manifest.files)
        watch(self, signature(self.watched))

    def reload(self) -> None:
        """Compare the files with their SHA-256 again. For a model exported without sums every change is a problem."""
        try:
            found = damaged_files(self._folder) if self._sums else [f"files of {self._folder} have changed"]
        except (SharpError, OSError) as error:
            found = [str(error)]
        self.problem = f"the weights have changed while they were served: {found[0]}" if found else None
        if self.problem is not None:
            logger.error("%s; responses may be wrong. Start the server again", self.problem)
