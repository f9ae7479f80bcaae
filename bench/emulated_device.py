"""`EmulatedDevice`: a backend that only waits, so that what the host adds to a step can be seen without a GPU."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from sharp.plugins.manifest import Manifest
from sharp.plugins.sampling import Changes
from sharp.serving.backends import Batch, Limits, StepOutput
from sharp.serving.config import BackendConfig


@dataclass(frozen=True)
class Computed:
    """A step of the device: its sequences, when it began by the clock, and the processor time of its thread by then."""

    sequences: int
    began: float
    processor: float


class EmulatedDevice:
    """Takes so many seconds a step, without a processor, and returns the same logits every time.

    The benchmark makes it and says how many blocks there are, so nothing loads it or asks for its memory; the engine
    knows a `SamplingBackend` by its methods, so it has these two all the same.
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
        """Not called: it has no file."""
        raise NotImplementedError

    def free_memory(self, largest: Limits) -> int:
        """Not called: the blocks are given."""
        raise NotImplementedError

    def allocate_cache(self, blocks: int) -> None:
        """Nothing: no key is kept."""

    def step(self, batch: Batch) -> StepOutput:
        """Wait; the logits are the device's own."""
        self._wait(batch)
        return StepOutput(self._logits[: len(batch.logits_indices)], self._stats(batch))

    def _stats(self, batch: Batch) -> NDArray[np.float32] | None:
        layers, heads, values = self._stats_shape
        return np.zeros((layers, len(batch.input_ids), heads, values), np.float32) if batch.collect_stats else None

    def _wait(self, batch: Batch) -> None:
        self.computed.append(Computed(len(batch.context_lens), time.perf_counter(), time.thread_time()))
        time.sleep(self.seconds)


class SamplingDevice(EmulatedDevice):
    """One that samples as well: only tokens come to the host."""

    def __init__(self, manifest: Manifest, seconds: float, rows: int) -> None:
        super().__init__(manifest, seconds, rows)
        self._tokens = np.random.default_rng(1).integers(0, manifest.vocab_size, 2**16)

    def step_and_sample(self, batch: Batch, samplings: NDArray[np.float64], changes: Changes | None) -> StepOutput:  # noqa: ARG002 - of the interface
        """Wait; the tokens are random ones."""
        self._wait(batch)
        first = 64 * len(self.computed) % (len(self._tokens) - len(samplings))
        return StepOutput(self._logits[:0], self._stats(batch), self._tokens[first : first + len(samplings)])
