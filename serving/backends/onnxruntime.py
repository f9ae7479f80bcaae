"""`OnnxRuntimeBackend`: runs a decoder in ONNX Runtime, on the CPU or on an NVIDIA GPU."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from sharp.core.machine import available_memory
from sharp.core.manifest import CacheDtype, Manifest
from sharp.plugins.cpu.sampling import Changes
from sharp.plugins.cuda.device import check_context, free_memory
from sharp.plugins.cuda.readback import Readback
from sharp.plugins.cuda.sampler import DeviceSampler, find_sampler
from sharp.plugins.op.cache_tensors import CacheTensor
from sharp.serving.api.errors import InputError
from sharp.serving.backends.backend import STEP_INPUTS, StepInputs, StepLimits, StepOutput
from sharp.serving.backends.cache_size import tensors_of
from sharp.serving.backends.cuda_provider import device_cache
from sharp.serving.backends.decode_graphs import DecodeGraphs, without_graph
from sharp.serving.backends.lost_device import lost_device
from sharp.serving.backends.session import open_model
from sharp.serving.backends.warm_up import first_step, largest_steps
from sharp.serving.config import BackendConfig

OUTPUTS = ("logits", "stats")
TENSOR_TYPES: dict[CacheDtype, str] = {
    "float32": "tensor(float)",
    "float16": "tensor(float16)",
    "bfloat16": "tensor(bfloat16)",
    "int8": "tensor(int8)",
    "fp8": "tensor(float8e4m3fn)",
}


class OnnxRuntimeBackend:
    """A model in ONNX Runtime whose inputs and outputs are bound to the key-value cache on the device that computes.

    With Sharp's kernels a cache input and its output are one buffer, updated in place. Without them there are two
    buffers, which are swapped after each step, because the op's function body may read a block after writing it.
    """

    def __init__(
        self,
        session: Any,
        manifest: Manifest,
        *,
        kernels: bool,
        device: str,
        gpu: int = 0,
        cuda_graphs: bool = False,
        graph_sizes: Sequence[int] = (),
    ) -> None:
        self._session = session
        self._device = device
        self._gpu = gpu  # number of the GPU
        self._captures, self._graph_sizes = cuda_graphs, graph_sizes
        self._graphs: DecodeGraphs | None = None
        self._largest: StepLimits | None = None  # the largest step, if it was computed
        self._manifest = manifest
        self._kernels = kernels
        self._binding = session.io_binding()
        self._caches = tensors_of(manifest)
        self._current: list[Any] = []
        self._next: list[Any] = []
        self._inputs: dict[str, NDArray[Any]] = {}  # keeps the bound arrays alive
        self._logits = np.empty((0, manifest.vocab_size), np.float32)
        self._readback = Readback(manifest.vocab_size, gpu) if device == "cuda" else None
        self._sampler: DeviceSampler | None = None
        # The currently bound outputs: rows, tokens, whether statistics are left out, and whether logits stay on the
        # device.
        self._bound_outputs: tuple[int, int, bool, bool] | None = None

    @property
    def kernels(self) -> bool:
        """Whether attention runs Sharp's kernels."""
        return self._kernels

    @property
    def device(self) -> str:
        """The device that the session computes on: "cpu" or "cuda"."""
        return self._device

    @property
    def screened(self) -> bool:
        """Whether the cache has key screens. Only Sharp's kernels use them; without, the screens are empty."""
        return self._kernels

    @property
    def limits(self) -> None:
        """None, because every size of step is possible."""

    def free_memory(self, largest: StepLimits) -> int:
        """Return the bytes of the device that the cache may take. Without Sharp's kernels the cache exists twice.

        A GPU computes the largest step first, so that the memory that ONNX Runtime takes for it (activations, logits,
        scratch memory of kernels) is no longer free. Without Sharp's kernels it does not, because standard ops would
        copy whole contexts of all sequences.

        Raises:
            InputError: the GPU has no kernels for the model, or not enough memory for the largest step.
        """
        if self._device == "cpu":
            return available_memory() // (1 if self._kernels else 2)
        if not self._kernels:
            return free_memory(self._gpu) // 2
        self._compute_largest(largest)
        return free_memory(self._gpu)

    @classmethod
    def load(cls, folder: Path, manifest: Manifest, config: BackendConfig) -> Self:
        """Load the model of a folder.

        Raises:
            InputError: ONNX Runtime cannot load the file, the file lacks inputs or outputs of a paged model, or the
                device cannot be used.
        """
        opened = open_model(folder, manifest, config)
        path, session = folder / manifest.model_file, opened.session
        backend = cls(
            session,
            manifest,
            kernels=opened.kernels,
            device=opened.device,
            gpu=config.gpu,
            cuda_graphs=opened.captures,
            graph_sizes=config.graph_sizes,
        )
        inputs = {value.name for value in session.get_inputs()}
        outputs = {value.name for value in session.get_outputs()}
        missing = {*STEP_INPUTS, *(tensor.name for tensor in backend._caches)} - inputs
        missing |= {*OUTPUTS, *(tensor.updated_name for tensor in backend._caches)} - outputs
        if missing:
            raise InputError(f"{path} lacks {', '.join(sorted(missing)[:4])}; export the model again")
        backend._check_shapes({value.name: value.shape for value in (*session.get_inputs(), *session.get_outputs())})
        backend._check_types({value.name: value.type for value in session.get_inputs()})
        return backend

    def _check_shapes(self, shapes: dict[str, list[int | str]]) -> None:
        """Check that the model's shapes are those of the manifest, else raise InputError.

        `shapes` are by input and output name; a varying dimension is a text.
        """
        m = self._manifest
        expected: dict[str, tuple[int | None, ...]] = {
            "logits": (None, m.vocab_size),
            "stats": (m.layers, None, m.q_heads, m.stats_columns),
        }
        expected |= {tensor.name: (None, *tensor.block_shape) for tensor in self._caches}
        for name, shape in expected.items():
            found = shapes[name]  # a dynamic dimension is a name in place of a number
            if [size for size, asked in zip(found, shape, strict=False) if asked] != [size for size in shape if size]:
                raise InputError(
                    f"{name} of the model has shape {found}, and sharp.json describes "
                    f"{[size or 'any' for size in shape]}; export the model again"
                )

    def _check_types(self, types: dict[str, str]) -> None:
        """Check that the model's caches have the types of the manifest, else raise InputError.

        `types` are ONNX types by input name, as "tensor(float16)".
        """
        for tensor in self._caches:
            expected = TENSOR_TYPES[tensor.dtype]
            if types[tensor.name] != expected:
                raise InputError(
                    f"{tensor.name} of the model is a {types[tensor.name]}, and sharp.json describes a {expected}; "
                    "export the model again"
                )

    def allocate_cache(self, blocks: int) -> None:
        """Allocate the key-value cache. On a CPU, blocks that are never used take no memory from the system.

        Raises:
            InputError: the model does not run on the GPU.
        """
        self._set_cache(blocks)
        if self._device == "cuda" and self._kernels and self._largest is None:
            self._sampler = find_sampler(self._manifest.vocab_size, self._gpu)
        if self._captures and self._readback is not None:
            values = list(zip(self._caches, self._current, strict=True))
            caches = {tensor.name: value for tensor, value in values}
            caches |= {tensor.updated_name: value for tensor, value in values}
            self._graphs = DecodeGraphs(
                self._session, self._manifest, caches, self._gpu, self._readback, self._sampler, self._graph_sizes
            )
        if self._device == "cuda":
            self._warm_up()
        if self._graphs is not None and self._largest is not None:
            self._graphs.capture(self._largest, lambda: free_memory(self._gpu))

    def _warm_up(self) -> None:
        """Compute some tokens, so that the GPU's kernels are loaded before the first request.

        Raises:
            InputError: the step fails, for example because there are no kernels for the model or for this GPU.
        """
        try:
            self.step(first_step())
        except Exception as error:  # ONNX Runtime has no common exception
            reason = str(error).strip().splitlines()[0]
            raise InputError(f"the model does not run on this GPU: {reason}; --device cpu runs it") from error

    def _compute_largest(self, largest: StepLimits) -> None:
        """Compute the largest steps, so that the memory that ONNX Runtime takes for them, and keeps, is no longer free.

        The cache has one block afterwards. The method also sets the sampler and `_largest`.

        Raises:
            InputError: the first small step or a largest step fails, most often for lack of memory.
        """
        self._set_cache(1)
        self._warm_up()
        self._sampler = find_sampler(self._manifest.vocab_size, self._gpu)
        if self._sampler is not None:
            self._sampler.logits(largest.sequences)
        self._largest = largest
        try:
            for batch in largest_steps(largest, self._manifest.cache.block_size):
                self._step(batch)
        except Exception as error:
            reason = str(error).strip().splitlines()[0]
            raise InputError(
                f"the largest step, of {largest.tokens} tokens and {largest.sequences} sequences, does not run on this "
                f"GPU: {reason}; lower --max-batch-tokens or --max-sequences"
            ) from error
        if self._readback is not None:
            self._readback.forget()  # frees the buffer, because requests may never need as many rows

    def step(self, batch: StepInputs) -> StepOutput:
        """Compute one step.

        Raises:
            DeviceLostError: the GPU is lost, so no later step can be computed either.
        """
        with lost_device(lambda: check_context(self._gpu)) if self._device == "cuda" else contextlib.nullcontext():
            return self._step(batch)

    def step_and_sample(self, batch: StepInputs, samplings: NDArray[np.float64], changes: Changes | None) -> StepOutput:
        """Compute one step and sample on the GPU. Without a GPU or the sampling kernel, return logits like `step`.

        Raises:
            DeviceLostError: the GPU is lost, so no later step can be computed either.
        """
        if self._sampler is None:
            return self.step(batch)
        with lost_device(lambda: check_context(self._gpu)):
            return self._step(batch, samplings, changes)

    def _step(
        self, batch: StepInputs, samplings: NDArray[np.float64] | None = None, changes: Changes | None = None
    ) -> StepOutput:
        """Run one step. `samplings` and `changes` are for sampling on the GPU; None leaves sampling to the caller."""
        if self._graphs is not None and self._graphs.has(batch):
            return self._graphs.step(batch, samplings, changes)
        binding, m = self._binding, self._manifest
        for name in STEP_INPUTS:
            self._bind_input(name, np.asarray(getattr(batch, name)))
        bound, self._bound_outputs = self._bound_outputs, None  # after a failure nothing counts as bound
        rows, tokens = len(batch.logits_indices), len(batch.input_ids)
        sampler = None if samplings is None else self._sampler
        logits = self._logits_of(rows if sampler is None else 0)
        of_stats = m.layers, tokens, m.q_heads, m.stats_columns
        stats = np.empty(of_stats, np.float32) if batch.collect_stats else None
        if stats is not None:
            binding.bind_ortvalue_output("stats", onnxruntime.OrtValue.ortvalue_from_numpy(stats))
        expected = rows, tokens, stats is None, sampler is not None
        if expected != bound:  # comparing is faster than binding again
            if sampler is None:
                binding.bind_ortvalue_output("logits", onnxruntime.OrtValue.ortvalue_from_numpy(logits))
            else:
                shape = rows, m.vocab_size
                binding.bind_output("logits", "cuda", self._gpu, np.float32, shape, sampler.logits(rows))
            if stats is None:
                binding.bind_output("stats", self._device, self._gpu)
        self._bound_outputs = expected
        self._session.run_with_iobinding(binding, without_graph() if self._captures else None)
        if not self._kernels:
            self._current, self._next = self._next, self._current
            self._bind_caches()
        if sampler is None or samplings is None:
            return StepOutput(logits, stats)
        return StepOutput(logits, stats, sampler.sample(sampler.logits(rows), np.arange(rows), samplings, changes))

    def _bind_input(self, name: str, array: NDArray[Any]) -> None:
        """Bind an input. On a CPU, write to memory that stays bound, because that is faster than binding again.

        `name` is the input's name in the model.
        """
        held = self._inputs.get(name)
        if self._device == "cpu" and held is not None and held.shape == array.shape:
            held[...] = array
            return
        self._inputs[name] = np.array(array, order="C")
        self._binding.bind_cpu_input(name, self._inputs[name])

    def _set_cache(self, blocks: int) -> None:
        """Allocate caches of `blocks` blocks, in place of the earlier ones, and bind them."""

        def make(tensor: CacheTensor) -> Any:
            """Return one cache on the device; an unused key screen gets no block."""
            if tensor.is_screen and not self.screened:
                return tensor.make(0)
            return device_cache(tensor, blocks, self._gpu) if self._device == "cuda" else tensor.make(blocks)

        self._current = [make(tensor) for tensor in self._caches]
        self._next = self._current if self._kernels else [make(tensor) for tensor in self._caches]
        self._bind_caches()

    def _bind_caches(self) -> None:
        """Bind the current caches as inputs and the next ones as outputs; kernels update one in place."""
        for tensor, current, following in zip(self._caches, self._current, self._next, strict=True):
            self._binding.bind_ortvalue_input(tensor.name, current)
            self._binding.bind_ortvalue_output(tensor.updated_name, following)

    def _logits_of(self, rows: int) -> NDArray[np.float32]:
        """Return memory for float32 logits [rows, vocab] that later steps reuse, so that none allocates it again."""
        if self._readback is not None:
            return self._readback.rows(rows)
        if len(self._logits) < rows:
            self._logits = np.empty((rows, self._manifest.vocab_size), np.float32)
        return self._logits[:rows]
