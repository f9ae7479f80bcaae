"""The interface between the engine and the runtime of a model."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from sharp.core.manifest import Manifest
from sharp.plugins.cpu.sampling import Changes
from sharp.serving.config import BackendConfig


@dataclass(frozen=True)
class StepInputs:
    """The inputs of one step, with the new tokens of all its sequences packed along one axis.

    Each field is the model input of the same name: `input_ids` and `positions` int64 [tokens]; `slot_mapping` int32
    [tokens], block * block_size + offset; `block_table` int32 [sequences, max_blocks], -1 = unused; `query_start` int32
    [sequences + 1]; `context_lens` int32 [sequences], tokens in the cache before this step; `logits_indices` int64
    [outputs], the tokens whose logits are returned, at least one.
    """

    input_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    slot_mapping: NDArray[np.int32]
    block_table: NDArray[np.int32]
    query_start: NDArray[np.int32]
    context_lens: NDArray[np.int32]
    logits_indices: NDArray[np.int64]
    collect_stats: bool


STEP_INPUTS = tuple(field.name for field in fields(StepInputs))


@dataclass(frozen=True)
class StepLimits:
    """The largest step that a backend computes: sequences, tokens, tokens of one sequence, and blocks of the cache."""

    sequences: int
    tokens: int
    context: int
    blocks: int


@dataclass(frozen=True)
class StepOutput:
    """The results of a step. `stats` is None unless the batch requested it.

    The caller owns the logits, and may overwrite them, until the next step. If the backend has sampled, `logits` is
    empty and `sampled` has the tokens.
    """

    logits: NDArray[np.float32]  # [outputs, vocab]
    stats: NDArray[np.float32] | None  # [layers, tokens, q_heads, 4 or 5]
    sampled: NDArray[np.int64] | None = None  # [outputs]


class DecoderBackend(Protocol):
    """A loaded model. Only one thread may use it at a time, but the thread may change."""

    @property
    def kernels(self) -> bool:
        """Whether attention runs Sharp's kernels instead of the standard ops of its function body."""

    @property
    def device(self) -> str:
        """The device that computes: "cpu" or "cuda"."""

    @property
    def screened(self) -> bool:
        """Whether the cache has the model's key screens, if the model has any."""

    @property
    def limits(self) -> StepLimits | None:
        """The sizes that the model was compiled for; None if every step is possible."""

    def free_memory(self, largest: StepLimits) -> int:
        """Return the bytes that the key-value cache may take beside the `largest` step. Call before `allocate_cache`.

        Raises:
            InputError: there is not enough memory for the largest step.
        """

    @classmethod
    def load(cls, folder: Path, manifest: Manifest, config: BackendConfig) -> Self:
        """Load the model of a folder.

        Raises:
            InputError: the model cannot be loaded.
            SharpError: software that the backend needs is missing.
        """

    def allocate_cache(self, blocks: int) -> None:
        """Allocate the key-value cache of `blocks` blocks. Call once, after `free_memory` and before the first step.

        Raises:
            InputError: the device does not run the model.
        """

    def step(self, batch: StepInputs) -> StepOutput:
        """Compute one step and update the cache. After an exception the step counts as not computed.

        Raises:
            DeviceLostError: the GPU is lost, so no later step can be computed either; the engine ends.
        """


@runtime_checkable
class SamplingBackend(DecoderBackend, Protocol):
    """A backend that samples on the device that computes, so that logits need not be copied to the host."""

    def step_and_sample(self, batch: StepInputs, samplings: NDArray[np.float64], changes: Changes | None) -> StepOutput:
        """Compute a step, and sample a token for each output like `plugins.cpu.sampling.sample`.

        `samplings` are the parameters, float64 [outputs, 5]: inverse temperature (0 takes the most likely token),
        top-k, top-p, min-p and a random number in [0, 1). `changes`, at most MOST_CHANGES (65,536) entries, are applied
        to the logits first. The engine calls this if it needs no logits: no row has logprobs, a guide or a list of
        allowed tokens. A backend that cannot sample returns logits, as `step` does.

        Raises:
            DeviceLostError: the GPU is lost, so no later step can be computed either.
        """
