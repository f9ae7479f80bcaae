"""`TensorRtBackend`: runs the TensorRT engine that `sharp build --backend tensorrt` wrote into the model folder."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from sharp.core.engine_manifest import ENGINE_FILE, EngineManifest, Shape, ShapeRange, read_engine_manifest
from sharp.core.manifest import Manifest
from sharp.plugins.cpu.sampling import Changes
from sharp.plugins.cuda.model_package import add_kernels_for_gpu
from sharp.plugins.cuda.runtime import Cuda
from sharp.plugins.cuda.sampler import find_sampler
from sharp.plugins.op.cache_tensors import CacheTensor
from sharp.plugins.tensorrt.package import import_tensorrt, load_plugin
from sharp.serving.api.errors import EngineError, InputError, SharpError
from sharp.serving.backends.backend import STEP_INPUTS, StepInputs, StepLimits, StepOutput
from sharp.serving.backends.cache_size import tensors_of
from sharp.serving.backends.lost_device import lost_device
from sharp.serving.config import BackendConfig

DTYPES = {
    "input_ids": "INT64",
    "positions": "INT64",
    "slot_mapping": "INT32",
    "block_table": "INT32",
    "query_start": "INT32",
    "context_lens": "INT32",
    "logits_indices": "INT64",
    "collect_stats": "BOOL",
    "logits": "FLOAT",
    "stats": "FLOAT",
}
ITEM_BYTES = {"INT64": 8, "INT32": 4, "BOOL": 1}
CACHE_DTYPES = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16", "int8": "INT8", "fp8": "FP8"}


class TensorRtBackend:
    """A TensorRT engine whose caches, inputs and outputs are in GPU memory that is allocated once.

    With Sharp's plugin a cache input and its output are one buffer. Without the plugin there are two buffers, which are
    swapped after each step.
    """

    def __init__(self, engine: Any, described: EngineManifest, manifest: Manifest, cuda: Cuda, gpu: int) -> None:
        self._engine = engine
        self._described = described
        self._manifest = manifest
        self._cuda = cuda
        self._gpu = gpu
        self._caches = _tensors_of(manifest, engine)
        self._stream = int(cuda.call("cudaStreamCreate"))
        self._profiles = _profiles(engine, self._caches)
        self._contexts = [self._make_context(number) for number in range(len(self._profiles))]
        self._current: list[int] = []  # addresses of the cache tensors that the next step reads
        self._next: list[int] = []
        self._memory = self._make_memory()
        self._logits = np.empty((0, manifest.vocab_size), np.float32)  # page-locked, and reused in every step
        self._sampler = find_sampler(manifest.vocab_size, gpu, self._stream)

    @property
    def kernels(self) -> bool:
        """Whether attention runs Sharp's plugin."""
        return self._described.plugin is not None

    @property
    def device(self) -> str:
        """The device that computes: always "cuda"."""
        return "cuda"

    @property
    def screened(self) -> bool:
        """Whether the engine has the model's key screens. Engines of older versions of Sharp have none."""
        return any(tensor.is_screen for tensor in self._caches)

    @property
    def limits(self) -> StepLimits:
        """The sizes that the engine was built for."""
        largest = {name: bounds[2] for name, bounds in self._profiles[-1].items()}
        return StepLimits(
            sequences=largest["context_lens"][0],
            tokens=largest["input_ids"][0],
            context=largest["block_table"][1] * self._manifest.cache.block_size,
            blocks=largest[self._caches[0].name][0],
        )

    @classmethod
    def load(cls, folder: Path, manifest: Manifest, config: BackendConfig) -> Self:
        """Load the engine of a model folder.

        Raises:
            InputError: there is no engine, the engine is not for this model and this version of TensorRT, a setting
                does not apply to TensorRT, or kernels are missing.
            SharpError: TensorRT, cuda-python or the plugin is missing, or the GPU has too little memory.
        """
        if config.device == "cpu" or not config.kernels:
            raise InputError("--backend tensorrt takes no --device cpu or --no-kernels; leave them out")
        path = folder / ENGINE_FILE
        if not path.is_file():
            raise InputError(f"{folder} has no {ENGINE_FILE}; make it with: sharp build {folder} --backend tensorrt")
        described = read_engine_manifest(path)
        content = path.read_bytes()
        trt, cuda, gpu = import_tensorrt(), Cuda(), config.gpu
        cuda.call("cudaSetDevice", gpu)
        _check(path, described, content, folder / manifest.model_file, trt.__version__)
        logger = trt.Logger(trt.Logger.ERROR)
        if described.plugin is not None:
            load_plugin(trt)
            add_kernels_for_gpu(folder, gpu)
        engine = trt.Runtime(logger).deserialize_cuda_engine(content)
        if engine is None:
            raise InputError(
                f"{path} cannot be loaded by TensorRT {trt.__version__} on this GPU; its messages are above. "
                f"Build it here with: sharp build {folder} --backend tensorrt"
            )
        _check_tensors(path, engine, _tensors_of(manifest, engine))
        return cls(engine, described, manifest, cuda, gpu)

    def free_memory(self, largest: StepLimits) -> int:  # noqa: ARG002 - required by the interface
        """Return the bytes of GPU memory that the cache may take. Without Sharp's plugin the cache exists twice.

        The memory of the largest step that the engine allows is not free: execution contexts took it at load.
        """
        free, _total = self._cuda.call("cudaMemGetInfo")
        return int(free) // (1 if self.kernels else 2)

    def allocate_cache(self, blocks: int) -> None:
        """Allocate the key-value cache, filled with zeros, because memory that was never written must not hold NaN."""

        def make() -> list[int]:
            """Return the device addresses of new, zeroed caches."""
            return [self._zeros(blocks * tensor.block_bytes) for tensor in self._caches]

        self._current = make()
        self._next = self._current if self.kernels else make()
        shapes = {tensor.name: (blocks, *tensor.block_shape) for tensor in self._caches}
        for context in self._contexts:
            for name, shape in shapes.items():
                _require(context.set_input_shape(name, shape), f"{name} of shape {shape}")
            for name, address in self._memory.items():
                _require(context.set_tensor_address(name, address), name)

    def step(self, batch: StepInputs) -> StepOutput:
        """Compute one step.

        Raises:
            EngineError: TensorRT refused the step or failed.
            DeviceLostError: the GPU is lost, so no later step can be computed either.
        """
        with self._on_device():
            return self._step(batch)

    def step_and_sample(self, batch: StepInputs, samplings: NDArray[np.float64], changes: Changes | None) -> StepOutput:
        """Compute one step and sample on the engine's stream. Without the sampling kernel, return logits.

        Raises:
            EngineError: TensorRT refused the step or failed.
            DeviceLostError: the GPU is lost, so no later step can be computed either.
        """
        if self._sampler is None:
            return self.step(batch)
        with self._on_device():
            return self._step(batch, samplings, changes)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Make the engine's GPU current in this thread; errors of a lost GPU become `DeviceLostError`."""
        with lost_device(lambda: self._cuda.call("cudaDeviceSynchronize")):
            # The current device belongs to the calling thread, which may not be the thread that loaded the engine.
            self._cuda.call("cudaSetDevice", self._gpu)
            yield

    def _step(
        self, batch: StepInputs, samplings: NDArray[np.float64] | None = None, changes: Changes | None = None
    ) -> StepOutput:
        """Run one step.

        With `samplings`, tokens are sampled on the GPU after `changes` to the logits, if a sampler is set.
        """
        # `inputs` keeps the arrays alive until the stream has copied them.
        inputs = {name: np.asarray(getattr(batch, name), order="C") for name in STEP_INPUTS}
        context = self._contexts[self._profile({name: array.shape for name, array in inputs.items()})]
        for name, array in inputs.items():
            _require(context.set_input_shape(name, array.shape), f"{name} of shape {array.shape}")
            self._cuda.copy_to_device(self._memory[name], array, self._stream)
        for tensor, current, following in zip(self._caches, self._current, self._next, strict=True):
            context.set_tensor_address(tensor.name, current)
            context.set_tensor_address(tensor.updated_name, following)
        _require(context.execute_async_v3(self._stream), "the step")
        m = self._manifest
        stats: NDArray[np.float32] | None = None
        if batch.collect_stats:
            stats = np.empty((m.layers, len(batch.input_ids), m.q_heads, m.stats_columns), np.float32)
            self._cuda.copy_to_host(stats, self._memory["stats"], self._stream)
        rows = len(batch.logits_indices)
        sampled: NDArray[np.int64] | None = None
        if samplings is not None and self._sampler is not None:
            sampled = self._sampler.sample(self._memory["logits"], np.arange(rows), samplings, changes)
            logits = self._logits[:0]
        else:
            logits = self._logits_of(rows)
            self._cuda.copy_to_host(logits, self._memory["logits"], self._stream)
        self._cuda.call("cudaStreamSynchronize", self._stream)
        self._current, self._next = self._next, self._current
        return StepOutput(logits, stats, sampled)

    def _logits_of(self, rows: int) -> NDArray[np.float32]:
        """Return page-locked memory for `rows` rows of logits, which is reused in later steps."""
        if len(self._logits) < rows:
            self._logits = self._cuda.page_locked(rows, self._manifest.vocab_size)
        return self._logits[:rows]

    def _make_context(self, profile: int) -> Any:
        """Return an execution context for an optimization profile. SharpError if the GPU's memory is used up."""
        context = self._engine.create_execution_context()
        if context is None or not context.set_optimization_profile_async(profile, self._stream):
            raise SharpError(
                "TensorRT could not make an execution context: most likely the GPU has no memory left; free "
                "some, or build an engine for smaller steps"
            )
        self._cuda.call("cudaStreamSynchronize", self._stream)
        return context

    def _make_memory(self) -> dict[str, int]:
        """Allocate memory for the inputs and outputs of the largest step, and return the addresses by name."""
        m, tokens = self._manifest, self.limits.tokens
        largest = {name: bounds[2] for name, bounds in self._profiles[-1].items()}
        sizes = {name: prod(largest.get(name, ())) * ITEM_BYTES[DTYPES[name]] for name in STEP_INPUTS}
        sizes |= {"logits": tokens * m.vocab_size * 4, "stats": m.layers * tokens * m.q_heads * m.stats_columns * 4}
        return {name: self._zeros(size) for name, size in sizes.items()}

    def _zeros(self, size: int) -> int:
        """Allocate `size` bytes of zeros on the GPU and return their address."""
        address = int(self._cuda.call("cudaMalloc", max(size, 1)))
        self._cuda.call("cudaMemset", address, 0, size)
        return address

    def _profile(self, shapes: Mapping[str, Shape]) -> int:
        """Return the number of the first profile that allows the shapes. The profile for decoding comes first.

        Raises:
            EngineError: no profile allows the shapes.
        """
        for number, profile in enumerate(self._profiles):
            if all(_between(shape, *profile[name]) for name, shape in shapes.items() if name in profile):
                return number
        raise EngineError(f"the engine takes no step of these shapes: {dict(shapes)}; its limits are {self.limits}")


def _check(path: Path, described: EngineManifest, content: bytes, model: Path, version: str) -> None:
    """Raise InputError if an engine is damaged, or was built for another model or by another version of TensorRT."""
    if described.backend != "TensorRT":
        raise InputError(f"{path} is an engine of {described.backend}; build one with --backend tensorrt")
    if hashlib.sha256(content).hexdigest() != described.sha256:
        raise InputError(f"{path} is not the engine that its manifest describes; build it again with sharp build")
    if hashlib.sha256(model.read_bytes()).hexdigest() != described.model_sha256:
        raise InputError(f"{path} was built from another {model.name}; build it again with sharp build")
    if described.version != version:
        raise InputError(
            f"{path} was built by TensorRT {described.version}, and only that one loads it; this is {version}. "
            "Build it again with sharp build"
        )


def _profiles(engine: Any, caches: tuple[CacheTensor, ...]) -> list[dict[str, ShapeRange]]:
    """Return, for each optimization profile, every varying input's smallest, usual and largest shape by name."""
    names = [*(name for name in STEP_INPUTS if name != "collect_stats"), *(tensor.name for tensor in caches)]

    def bounds(name: str, profile: int) -> ShapeRange:
        """Return smallest, usual and largest shape of an input in a profile."""
        smallest, usual, largest = (tuple(shape) for shape in engine.get_tensor_profile_shape(name, profile))
        return smallest, usual, largest

    count = engine.num_optimization_profiles
    return [{name: bounds(name, profile) for name in names} for profile in range(count)]


def _names_of(engine: Any) -> set[str]:
    """Return the names of the engine's inputs and outputs."""
    return {engine.get_tensor_name(number) for number in range(engine.num_io_tensors)}


def _tensors_of(manifest: Manifest, engine: Any) -> tuple[CacheTensor, ...]:
    """Return the tensors of the model's cache, without key screens that the engine does not have."""
    names = _names_of(engine)
    return tuple(tensor for tensor in tensors_of(manifest) if not tensor.is_screen or tensor.name in names)


def _check_tensors(path: Path, engine: Any, caches: tuple[CacheTensor, ...]) -> None:
    """Check that the engine file has all inputs and outputs, of the types of the caches; else raise InputError."""
    expected = dict(DTYPES)
    for tensor in caches:
        expected |= dict.fromkeys((tensor.name, tensor.updated_name), CACHE_DTYPES[tensor.dtype])
    if missing := sorted(set(expected) - _names_of(engine)):
        raise InputError(f"{path} lacks {', '.join(missing[:4])}; build it again with sharp build")
    for name, dtype in expected.items():
        found = engine.get_tensor_dtype(name).name
        if found != dtype:
            raise InputError(f"{name} of {path} is {found}, but must be {dtype}; build it again with sharp build")


def _between(shape: Shape, smallest: Shape, _usual: Shape, largest: Shape) -> bool:
    """Whether each dimension of `shape` lies within the profile's smallest and largest."""
    return all(low <= size <= high for low, size, high in zip(smallest, shape, largest, strict=True))


def _require(done: bool, what: str) -> None:
    """Raise EngineError that TensorRT refused `what`, unless `done`."""
    if not done:
        raise EngineError(f"TensorRT refused {what}; its messages are above")
