"""`TensorBackend`: a model of sets or of numbers in ONNX Runtime, on the CPU or on an NVIDIA GPU."""

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from sharp.plugins.cuda.device import check_context
from sharp.plugins.manifest import Manifest
from sharp.serving.api.errors import InputError
from sharp.serving.backends.encoder import COLLECT_STATS, STATS
from sharp.serving.backends.lost_device import lost_device
from sharp.serving.backends.session import open_model
from sharp.serving.config import BackendConfig


class TensorBackend:
    """A loaded model. One thread uses it."""

    def __init__(self, session: Any, output: str, *, device: str, kernels: bool) -> None:
        """`output` is the name of the graph's output."""
        self._session = session
        self._output = output
        self.device = device
        self.kernels = kernels

    @classmethod
    def load(cls, folder: Path, manifest: Manifest, output: str, config: BackendConfig) -> Self:
        """Load the model of a folder.

        Raises:
            InputError: it cannot be loaded, or lacks inputs or outputs that the manifest names; or the settings are of
                another backend.
        """
        if config.name != "onnxruntime":
            raise InputError(f"backend is {config.name!r}, and models without a cache run in onnxruntime only")
        opened = open_model(folder, manifest, replace(config, cuda_graphs=False))
        there = {value.name for value in (*opened.session.get_inputs(), *opened.session.get_outputs())}
        # `collect_stats` has a default, and is not among the inputs for that.
        if missing := {*(port.name for port in manifest.inputs), output, STATS} - there - {COLLECT_STATS}:
            lacking = ", ".join(sorted(missing))
            raise InputError(f"{folder / manifest.model_file} lacks {lacking}; export the model again")
        return cls(opened.session, output, device=opened.device, kernels=opened.kernels)

    def run(
        self, inputs: Mapping[str, NDArray[np.float32]], *, collect_stats: bool
    ) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
        """The output for a batch, and statistics [layers, batch, q_heads, queries, 4 or 5] if they are to be collected.

        Raises:
            DeviceLostError: no later batch can be computed either.
        """
        feeds: dict[str, NDArray[Any]] = dict(inputs)
        names = [self._output]
        if collect_stats:
            feeds[COLLECT_STATS] = np.array(True)
            names.append(STATS)
        with lost_device(check_context) if self.device == "cuda" else contextlib.nullcontext():
            values, *stats = self._session.run(names, feeds)
        return values, stats[0] if stats else None
