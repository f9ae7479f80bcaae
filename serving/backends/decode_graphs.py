"""Decode steps as CUDA graphs: ONNX Runtime captures a step of fixed shapes once and replays it as a single launch."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from sharp.core.manifest import Manifest
from sharp.plugins.cpu.sampling import Changes
from sharp.plugins.cuda.readback import Readback
from sharp.plugins.cuda.sampler import DeviceSampler
from sharp.serving.backends.backend import STEP_INPUTS, StepInputs, StepLimits, StepOutput
from sharp.serving.backends.cuda_provider import device_tensor
from sharp.serving.backends.warm_up import decode_step

logger = logging.getLogger(__name__)

# ONNX Runtime's run option with the id of the graph to capture or replay, and its value for no graph.
GRAPH_OPTION, NO_GRAPH = "gpu_graph_id", "-1"
FEWEST_PAGES = 64  # smallest number of blocks per sequence; graphs for fewer would not be worth their memory
ONNX_TYPES = {np.dtype(np.int64): 7, np.dtype(np.int32): 6, np.dtype(np.bool_): 9}
FLOAT = 1


def is_decode(batch: StepInputs) -> bool:
    """Whether every sequence of the batch computes exactly one token."""
    return len(batch.input_ids) == len(batch.context_lens) and bool((np.diff(batch.query_start) == 1).all())


def graph_size(batch: StepInputs, sizes: Sequence[int] = ()) -> tuple[int, int]:
    """Return the numbers of sequences and blocks of the graph for a decode step.

    Both are rounded up to a power of two, or sequences to the next of `sizes` if one is large enough.
    """
    sequences, pages = batch.block_table.shape
    fits = next((size for size in sizes if size >= sequences), 1 << (sequences - 1).bit_length())
    return fits, 1 << (max(pages, FEWEST_PAGES) - 1).bit_length()


def padded(batch: StepInputs, sequences: int, pages: int) -> StepInputs:
    """Return a decode step padded to `sequences` sequences with `pages` blocks each.

    Added tokens see no keys and are not stored.
    """
    missing = sequences - len(batch.context_lens)

    def longer(array: NDArray[Any], value: int) -> NDArray[Any]:
        """Return the array with `value` appended once per missing sequence."""
        return np.concatenate([array, np.full(missing, value, array.dtype)])

    table = np.full((sequences, pages), -1, np.int32)
    table[: batch.block_table.shape[0], : batch.block_table.shape[1]] = batch.block_table
    return StepInputs(
        input_ids=longer(batch.input_ids, 0),
        positions=longer(batch.positions, 0),
        slot_mapping=longer(batch.slot_mapping, -1),
        block_table=table,
        query_start=np.arange(sequences + 1, dtype=np.int32),
        context_lens=longer(batch.context_lens, 0),
        logits_indices=np.arange(sequences),
        collect_stats=batch.collect_stats,
    )


@dataclass(frozen=True)
class _Graph:
    """The input and output memory of one graph, which a replay reads and writes."""

    inputs: dict[str, Any]
    logits: Any  # float32 [sequences, vocab]
    stats: Any  # float32 [layers, sequences, q_heads, 4 or 5]
    binding: Any
    options: Any


def _powers(first: int, most: int) -> Iterator[int]:
    """Yield `first` times the powers of two, up to the first product that is at least `most`."""
    yield first
    while first < most:
        first *= 2
        yield first


class DecodeGraphs:
    """The graphs for all sizes of decode steps. The first step of a size captures its graph."""

    def __init__(
        self,
        session: Any,
        manifest: Manifest,
        caches: dict[str, Any],
        gpu: int,
        readback: Readback,
        sampler: DeviceSampler | None,
        sizes: Sequence[int] = (),
    ) -> None:
        """Prepare graphs over `caches`, the tensors on GPU `gpu` by the names of the session's inputs and outputs.

        Logits are copied to the host by `readback`, unless `sampler` samples from them. `sizes` are the numbers of
        sequences that graphs exist for, in ascending order; if empty, all powers of two.
        """
        self._sizes = tuple(sizes)
        self._session = session
        self._manifest = manifest
        self._caches = caches
        self._gpu = gpu
        self._readback = readback
        self._sampler = sampler
        self._outputs = {value.name for value in session.get_outputs()}
        self._graphs: dict[tuple[int, int], _Graph] = {}

    def has(self, batch: StepInputs) -> bool:
        """Whether the step is a decode step with no more sequences than the largest graph."""
        return is_decode(batch) and (not self._sizes or len(batch.context_lens) <= self._sizes[-1])

    def capture(self, largest: StepLimits, memory: Callable[[], int]) -> None:
        """Capture the graphs of all sizes up to the largest step, so that no request waits for a capture.

        Short contexts come first. `memory` returns the free bytes. When half of the initially free memory is taken,
        capturing stops, and the steps that need the remaining sizes capture them.
        """
        began, least = time.monotonic(), memory() // 2
        longest = -(-largest.context // self._manifest.cache.block_size)
        for pages in _powers(FEWEST_PAGES, longest):
            for sequences in self._sizes or _powers(1, largest.sequences):
                if memory() < least:
                    logger.warning("not all sizes of decode steps are captured at start: memory is short")
                    return
                self.step(decode_step(sequences, pages))
        logger.info("%d CUDA graphs captured in %.1f s", len(self._graphs), time.monotonic() - began)

    def step(
        self, batch: StepInputs, samplings: NDArray[np.float64] | None = None, changes: Changes | None = None
    ) -> StepOutput:
        """Compute a decode step for which `has` is true. The first step of a size captures its graph.

        With `samplings` (parameters as in `SamplingBackend.step_and_sample`) and a sampler, also sample, after applying
        `changes` to the logits. The next step overwrites the returned logits.
        """
        size = graph_size(batch, self._sizes)
        whole = padded(batch, *size)
        arrays = {name: np.asarray(getattr(whole, name)) for name in STEP_INPUTS}
        if size not in self._graphs:
            self._graphs[size] = self._make(arrays)
        graph = self._graphs[size]
        for name, array in arrays.items():
            graph.inputs[name].update_inplace(array)
        self._session.run_with_iobinding(graph.binding, graph.options)
        stats = graph.stats.numpy()[:, : len(batch.input_ids)] if batch.collect_stats else None
        logits = graph.logits.data_ptr()
        if samplings is not None and self._sampler is not None:
            sampled = self._sampler.sample(logits, batch.logits_indices, samplings, changes)
            return StepOutput(self._readback.rows(0), stats, sampled)
        # Logits of padding are not copied, because they may be half of all.
        return StepOutput(self._readback.copy(logits, batch.logits_indices), stats)

    def _make(self, arrays: dict[str, NDArray[Any]]) -> _Graph:
        """Capture a CUDA graph for decode steps with inputs of these shapes, with device memory of its own for them."""
        m = self._manifest
        sequences = len(arrays["context_lens"])
        inputs = {
            name: device_tensor(array.shape, ONNX_TYPES[array.dtype], self._gpu) for name, array in arrays.items()
        }
        logits = device_tensor((sequences, m.vocab_size), FLOAT, self._gpu)
        stats = device_tensor((m.layers, sequences, m.q_heads, m.stats_columns), FLOAT, self._gpu)
        binding = self._session.io_binding()
        for name, value in (inputs | self._caches | {"logits": logits, "stats": stats}).items():
            if name in self._outputs:
                binding.bind_ortvalue_output(name, value)
            else:
                binding.bind_ortvalue_input(name, value)
        options = onnxruntime.RunOptions()
        options.add_run_config_entry(GRAPH_OPTION, str(len(self._graphs) + 1))
        return _Graph(inputs, logits, stats, binding, options)


def without_graph() -> Any:
    """Return run options that neither capture nor replay a graph, for a session that captures."""
    options = onnxruntime.RunOptions()
    options.add_run_config_entry(GRAPH_OPTION, NO_GRAPH)
    return options
