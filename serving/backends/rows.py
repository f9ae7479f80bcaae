"""`RowBackend`: runs a model without a cache in ONNX Runtime, on the CPU or on an NVIDIA GPU."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from sharp.core.manifest import Manifest
from sharp.plugins.cuda.device import check_context
from sharp.serving.api.errors import InputError
from sharp.serving.backends.lost_device import lost_device
from sharp.serving.backends.session import open_model
from sharp.serving.config import BackendConfig

STATS, COLLECT_STATS = "stats", "collect_stats"


@dataclass(frozen=True)
class RowOutput:
    """The results of a batch: the model's output `values` float32 [batch, ...], and attention statistics.

    `stats` are float32 [layers, batch, q_heads, queries, 4 or 5], None unless the batch requested them.
    """

    values: NDArray[np.float32]  # [batch, ...]
    stats: NDArray[np.float32] | None  # [layers, batch, q_heads, queries, 4 or 5]


class RowBackend:
    """A loaded encoder, or a loaded model of sets or of numbers. Only one thread may use it."""

    def __init__(self, session: Any, output: str, *, device: str, kernels: bool) -> None:
        """Use a session whose result is the graph's output named `output`."""
        self._session = session
        self._inputs = frozenset(value.name for value in session.get_inputs())
        self._output = output
        self.device = device
        self.kernels = kernels

    @classmethod
    def load(cls, folder: Path, manifest: Manifest, inputs: Sequence[str], output: str, config: BackendConfig) -> Self:
        """Load the model of a folder, which must have these inputs and this output.

        Raises:
            InputError: the model cannot be loaded or lacks an input or output, or the settings choose another backend
                than onnxruntime.
        """
        if config.name != "onnxruntime":
            raise InputError(
                f"backend is {config.name!r}, and models without a cache run in onnxruntime only; leave --backend out"
            )
        opened = open_model(folder, manifest, replace(config, cuda_graphs=False))
        there = {value.name for value in (*opened.session.get_inputs(), *opened.session.get_outputs())}
        if missing := {*inputs, output, STATS} - there:
            lacking = ", ".join(sorted(missing))
            raise InputError(f"{folder / manifest.model_file} lacks {lacking}; export the model again")
        return cls(opened.session, output, device=opened.device, kernels=opened.kernels)

    def run(self, inputs: Mapping[str, NDArray[Any]], *, collect_stats: bool) -> RowOutput:
        """Compute a batch. `inputs` are [batch, ...] by name; an array that the model does not read is left out.

        Raises:
            DeviceLostError: the GPU is lost, so no later batch can be computed either.
        """
        feeds = {name: array for name, array in inputs.items() if name in self._inputs}
        names = [self._output]
        if collect_stats:  # the graph has a default for this input, so ONNX Runtime does not list it
            feeds[COLLECT_STATS] = np.array(True)
            names.append(STATS)
        with lost_device(check_context) if self.device == "cuda" else contextlib.nullcontext():
            values, *stats = self._session.run(names, feeds)
        return RowOutput(values, stats[0] if stats else None)
