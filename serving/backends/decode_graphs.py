"""Decode steps as CUDA graphs: ONNX Runtime captures a step of fixed shapes once and replays it as a single launch."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from sharp.plugins.cuda.readback import Readback
from sharp.plugins.cuda.sampler import DeviceSampler
from sharp.plugins.manifest import Manifest
from sharp.plugins.sampling import Changes
from sharp.serving.backends.backend import STEP_INPUTS, Batch, Limits, StepOutput
from sharp.serving.backends.cuda_provider import device_tensor
from sharp.serving.backends.warm_up import decode_step

logger = logging.getLogger(__name__)

# Which graph a run captures or replays: ONNX Runtime's own name of the option, and what it takes for none.
GRAPH_OPTION, NO_GRAPH = "gpu_graph_id", "-1"
FEWEST_PAGES = 64  # blocks of a sequence; below it a graph for every size would not be worth its memory
ONNX_TYPES = {np.dtype(np.int64): 7, np.dtype(np.int32): 6, np.dtype(np.bool_): 9}
FLOAT = 1


def is_decode(batch: Batch) -> bool:
    """Whether every sequence of the batch computes one token."""
    return len(batch.input_ids) == len(batch.context_lens) and bool((np.diff(batch.query_start) == 1).all())


def graph_size(batch: Batch, sizes: Sequence[int] = ()) -> tuple[int, int]:
    """Sequences and blocks of the graph for a decode step: the next powers of two; of sequences the next of `sizes`."""
    sequences, pages = batch.block_table.shape
    fits = next((size for size in sizes if size >= sequences), 1 << (sequences - 1).bit_length())
    return fits, 1 << (max(pages, FEWEST_PAGES) - 1).bit_length()


def padded(batch: Batch, sequences: int, pages: int) -> Batch:
    """A decode step with more sequences and blocks; the tokens that are added see nothing and are stored nowhere."""
    missing = sequences - len(batch.context_lens)

    def longer(array: NDArray[Any], value: int) -> NDArray[Any]:
        return np.concatenate([array, np.full(missing, value, array.dtype)])

    table = np.full((sequences, pages), -1, np.int32)
    table[: batch.block_table.shape[0], : batch.block_table.shape[1]] = batch.block_table
    return Batch(
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
    """Memory of one graph's inputs and outputs, which a replay reads and writes."""

    inputs: dict[str, Any]
    logits: Any  # float32 [sequences, vocab]
    stats: Any  # float32 [layers, sequences, q_heads, 4 or 5]
    binding: Any
    options: Any


def _powers(first: int, most: int) -> Iterator[int]:
    """Powers of two from `first` on, up to the first that is at least `most`."""
    yield first
    while first < most:
        first *= 2
        yield first


class DecodeGraphs:
    """A graph for every size that decode steps come in; the first step of a size captures it."""

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
        """`caches` are the tensors on the GPU of that number, by the names of the session's inputs and outputs.

        Logits come to the host through `readback`, unless `sampler` samples from them. `sizes` are the numbers of
        sequences that there are graphs for, in order; without any, all powers of two.
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

    def has(self, batch: Batch) -> bool:
        """Whether the step is one of decoding, and of no more sequences than the largest graph."""
        return is_decode(batch) and (not self._sizes or len(batch.context_lens) <= self._sizes[-1])

    def capture(self, largest: Limits, memory: Callable[[], int]) -> None:
        """Capture the graphs of all sizes up to the largest step, short contexts first: no request waits for it then.

        `memory` says how many bytes are free. Where half of what was free is taken, the sizes that are left are
        captured by the steps that need them.
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
        self, batch: Batch, samplings: NDArray[np.float64] | None = None, changes: Changes | None = None
    ) -> StepOutput:
        """Compute a decode step; with `samplings`, and where it can be, sample as well, after the `changes`."""
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
        # Not those of padding: they may be half of them.
        return StepOutput(self._readback.copy(logits, batch.logits_indices), stats)

    def _make(self, arrays: dict[str, NDArray[Any]]) -> _Graph:
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
    """Options of a run that is neither captured nor replayed, in a session that captures."""
    options = onnxruntime.RunOptions()
    options.add_run_config_entry(GRAPH_OPTION, NO_GRAPH)
    return options
