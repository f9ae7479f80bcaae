"""`EmulatedDevice`: a backend that only waits, so that the host's share of a step can be measured without a GPU."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from sharp.core.manifest import Manifest
from sharp.plugins.cpu.sampling import Changes
from sharp.serving.backends import StepInputs, StepLimits, StepOutput
from sharp.serving.config import BackendConfig


@dataclass(frozen=True)
class Computed:
    """A step that the emulated device has begun.

    Attributes:
        sequences: the number of sequences in the step.
        began: when it began, in seconds of `time.perf_counter`.
        processor: the CPU seconds that the calling thread had taken by then.
    """

    sequences: int
    began: float
    processor: float


class EmulatedDevice:
    """A backend whose step takes `seconds`, without a processor, and returns the same logits every time.

    `rows` is the most rows of logits of a step. `computed` has every step so far.

    The benchmark makes the backend and sets the number of blocks, so nothing calls `load` and `free_memory`. They exist
    because the engine knows a `SamplingBackend` by its methods.
    """

    kernels = screened = True
    device = "cpu"  # so that synchronous scheduling computes a step where it plans it
    limits = None

    def __init__(self, manifest: Manifest, seconds: float, rows: int) -> None:
        self.seconds = seconds
        self.computed: list[Computed] = []
        generator = np.random.default_rng(0)
        self._logits = generator.standard_normal((rows, manifest.vocab_size), np.float32)
        self._stats_shape = manifest.layers, manifest.q_heads, 4

    @classmethod
    def load(cls, folder: Path, manifest: Manifest, config: BackendConfig) -> Self:
        """Raise NotImplementedError, because the device has no file."""
        raise NotImplementedError

    def free_memory(self, largest: StepLimits) -> int:
        """Raise NotImplementedError, because the number of blocks is given."""
        raise NotImplementedError

    def allocate_cache(self, blocks: int) -> None:
        """Do nothing, because no key is kept."""

    def step(self, batch: StepInputs) -> StepOutput:
        """Wait, and return the device's fixed logits, and statistics of 0 if the batch collects them."""
        self._wait(batch)
        return StepOutput(self._logits[: len(batch.logits_indices)], self._stats(batch))

    def _stats(self, batch: StepInputs) -> NDArray[np.float32] | None:
        """Return statistics of zeros [layers, tokens, q_heads, columns], or None if the step collects none."""
        layers, heads, values = self._stats_shape
        return np.zeros((layers, len(batch.input_ids), heads, values), np.float32) if batch.collect_stats else None

    def _wait(self, batch: StepInputs) -> None:
        """Record the step and sleep for the time that the emulated device takes."""
        self.computed.append(Computed(len(batch.context_lens), time.perf_counter(), time.thread_time()))
        time.sleep(self.seconds)


class SamplingDevice(EmulatedDevice):
    """An emulated device that samples as well, so that only tokens come to the host."""

    def __init__(self, manifest: Manifest, seconds: float, rows: int) -> None:
        super().__init__(manifest, seconds, rows)
        self._tokens = np.random.default_rng(1).integers(0, manifest.vocab_size, 2**16)

    def step_and_sample(self, batch: StepInputs, samplings: NDArray[np.float64], changes: Changes | None) -> StepOutput:  # noqa: ARG002 - of the interface
        """Wait for the device's time of a step, and return random tokens for the outputs of the batch."""
        self._wait(batch)
        first = 64 * len(self.computed) % (len(self._tokens) - len(samplings))
        return StepOutput(self._logits[:0], self._stats(batch), self._tokens[first : first + len(samplings)])
