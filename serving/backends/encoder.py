"""`EncoderBackend`: an encoder in ONNX Runtime, on the CPU or on an NVIDIA GPU."""

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from sharp.plugins.cuda.device import check_context
from sharp.plugins.manifest import Manifest
from sharp.serving.api.errors import InputError
from sharp.serving.backends.lost_device import lost_device
from sharp.serving.backends.session import open_model
from sharp.serving.config import BackendConfig

STATS, COLLECT_STATS, TOKEN_TYPES = "stats", "collect_stats", "token_type_ids"


@dataclass(frozen=True)
class EncoderBatch:
    """Whole texts, with padding behind the shorter ones; each array int64 [batch, length]."""

    input_ids: NDArray[np.int64]
    attention_mask: NDArray[np.int64]  # 1 at tokens, 0 at padding
    token_type_ids: NDArray[np.int64]
    collect_stats: bool = False


@dataclass(frozen=True)
class EncoderOutput:
    """What a batch gave; `stats` is None unless the batch requested it."""

    values: NDArray[np.float32]  # hidden states [batch, length, size], or logits [batch, labels]
    stats: NDArray[np.float32] | None  # [layers, batch, q_heads, length, 4 or 5]


class EncoderBackend:
    """A loaded encoder. One thread uses it."""

    def __init__(self, session: Any, output: str, *, device: str, kernels: bool) -> None:
        """`output` is the name of the graph's output."""
        self._session = session
        self._output = output
        self._reads_types = TOKEN_TYPES in {value.name for value in session.get_inputs()}
        self.device = device
        self.kernels = kernels

    @classmethod
    def load(cls, folder: Path, manifest: Manifest, config: BackendConfig) -> Self:
        """Load the encoder of a folder.

        Raises:
            InputError: it cannot be loaded, or has not the inputs and outputs of an encoder; or the settings are of
                another backend.
        """
        if config.name != "onnxruntime":
            raise InputError(f"backend is {config.name!r}, and encoders run in onnxruntime only")
        opened = open_model(folder, manifest, replace(config, cuda_graphs=False))
        output = "logits" if manifest.embedding is None else "hidden_states"
        inputs = {value.name for value in opened.session.get_inputs()}
        outputs = {value.name: value.shape for value in opened.session.get_outputs()}
        if missing := ({"input_ids", "attention_mask"} - inputs) | ({output, STATS} - outputs.keys()):
            lacking = ", ".join(sorted(missing))
            raise InputError(f"{folder / manifest.model_file} lacks {lacking}; export the model again")
        return cls(opened.session, output, device=opened.device, kernels=opened.kernels)

    def run(self, batch: EncoderBatch) -> EncoderOutput:
        """Compute a batch.

        Raises:
            DeviceLostError: no later batch can be computed either.
        """
        feeds = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
        if self._reads_types:
            feeds[TOKEN_TYPES] = batch.token_type_ids
        names = [self._output]
        if batch.collect_stats:
            feeds[COLLECT_STATS] = np.array(True)
            names.append(STATS)
        with lost_device(check_context) if self.device == "cuda" else contextlib.nullcontext():
            values, *stats = self._session.run(names, feeds)
        return EncoderOutput(values, stats[0] if stats else None)
