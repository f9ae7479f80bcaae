"""What runs the model: each backend in a module of its own, imported only when it is chosen."""

from importlib import import_module
from pathlib import Path

from sharp.plugins.manifest import Manifest
from sharp.serving.api.errors import NotFoundError
from sharp.serving.backends.backend import Backend, Batch, Limits, SamplingBackend, StepOutput
from sharp.serving.config import BACKENDS, BackendConfig

__all__ = ["BACKENDS", "Backend", "Batch", "Limits", "SamplingBackend", "StepOutput", "load_backend"]


def load_backend(folder: Path, manifest: Manifest, config: BackendConfig) -> Backend:
    """The model of `folder`, loaded by the backend that `config` names.

    Raises:
        NotFoundError: there is no backend of that name.
        InputError: the model cannot be loaded.
    """
    if config.name not in BACKENDS:
        raise NotFoundError(f"there is no backend {config.name!r}; there are: {', '.join(sorted(BACKENDS))}")
    module, _, name = BACKENDS[config.name].partition(":")
    backend: Backend = getattr(import_module(module), name).load(folder, manifest, config)
    return backend
