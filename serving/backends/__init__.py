"""Backends, which run the model. Each has its own module, imported only when the backend is chosen."""

from importlib import import_module
from pathlib import Path

from sharp.core.manifest import Manifest
from sharp.serving.api.errors import NotFoundError
from sharp.serving.backends.backend import DecoderBackend, SamplingBackend, StepInputs, StepLimits, StepOutput
from sharp.serving.config import BACKENDS, BackendConfig

__all__ = ["BACKENDS", "DecoderBackend", "SamplingBackend", "StepInputs", "StepLimits", "StepOutput", "load_backend"]


def load_backend(folder: Path, manifest: Manifest, config: BackendConfig) -> DecoderBackend:
    """Load the model of `folder` with the backend that `config` names.

    Raises:
        NotFoundError: there is no backend of that name.
        InputError: the model cannot be loaded.
        SharpError: software that the backend needs is missing.
    """
    if config.name not in BACKENDS:
        raise NotFoundError(f"there is no backend {config.name!r}; there are: {', '.join(sorted(BACKENDS))}")
    module, _, name = BACKENDS[config.name].partition(":")
    backend: DecoderBackend = getattr(import_module(module), name).load(folder, manifest, config)
    return backend
