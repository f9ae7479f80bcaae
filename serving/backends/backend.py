"""The interface between the engine and the runtime of a model."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from sharp.plugins.manifest import Manifest
from sharp.plugins.sampling import Changes
from sharp.serving.config import BackendConfig


@dataclass(frozen=True)
class Batch:
    """The inputs of one step: the new tokens of all its sequences packed along one axis.

    Each field is the model input of the same name.
    """

    input_ids: NDArray[np.int64]  # [tokens]
    positions: NDArray[np.int64]  # [tokens]
    slot_mapping: NDArray[np.int32]  # [tokens]: block * block_size + offset
    block_table: NDArray[np.int32]  # [sequences, max_blocks], -1 = unused
    query_start: NDArray[np.int32]  # [sequences + 1]
    context_lens: NDArray[np.int32]  # [sequences]: tokens in the cache before this step
    logits_indices: NDArray[np.int64]  # [outputs]: the tokens whose logits are returned, at least one
    collect_stats: bool


STEP_INPUTS = tuple(field.name for field in fields(Batch))


@dataclass(frozen=True)
class Limits:
    """The largest step that a backend computes: sequences, tokens, tokens of one sequence, blocks of the cache."""

    sequences: int
    tokens: int
    context: int
    blocks: int


@dataclass(frozen=True)
class StepOutput:
    """What a step computed; `stats` is None unless the batch requested it.

    The logits are the caller's, who may write into them, until the next step. Where the backend has sampled, there are
    tokens in their place.
    """

    logits: NDArray[np.float32]  # [outputs, vocab]
    stats: NDArray[np.float32] | None  # [layers, tokens, q_heads, 4 or 5]
    sampled: NDArray[np.int64] | None = None  # [outputs]


class Backend(Protocol):
    """A loaded model. One thread at a time uses it, which may be another one than before."""

    @property
    def kernels(self) -> bool:
        """Whether attention runs our kernels and not the standard ops of its function body."""

    @property
    def device(self) -> str:
        """Where it runs: "cpu" or "cuda"."""

    @property
    def screened(self) -> bool:
        """Whether its cache has the key screens of a model that has some."""

    @property
    def limits(self) -> Limits | None:
        """What the model was compiled for; None takes every step."""

    def free_memory(self, largest: Limits) -> int:
        """Bytes that the key-value cache may have beside the `largest` step; to be called before `allocate_cache`.

        Raises:
            InputError: there is no memory for that step.
        """

    @classmethod
    def load(cls, folder: Path, manifest: Manifest, config: BackendConfig) -> Self:
        """Load the model of a folder; raise InputError when it cannot be loaded."""

    def allocate_cache(self, blocks: int) -> None:
        """Make the key-value cache; to be called once, before the first step."""

    def step(self, batch: Batch) -> StepOutput:
        """Compute one step and update the cache; any exception means that the step did not happen.

        Raises:
            DeviceLostError: no later step can be computed either; the engine ends.
        """


@runtime_checkable
class SamplingBackend(Backend, Protocol):
    """A backend that samples where it computes, so that logits need not travel."""

    def step_and_sample(self, batch: Batch, samplings: NDArray[np.float64], changes: Changes | None) -> StepOutput:
        """`step`, and a token for each output as `plugins.sampling.sample` samples it: samplings float64 [outputs, 5].

        First the logits are changed, by MOST_CHANGES or fewer. The engine asks for it where it needs no logits: no row
        has logprobs, a guide or a list of allowed tokens. Where the backend cannot sample it returns logits, as `step`
        does.
        """
