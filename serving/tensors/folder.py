"""The folder of a model of sets or of numbers, loaded and ready for requests."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sharp.plugins.errors import InputError
from sharp.plugins.manifest import Manifest, Port
from sharp.serving.api.errors import DeviceLostError, FieldError
from sharp.serving.api.request import GenerateRequest, new_request_id
from sharp.serving.api.tensors import TensorRequest
from sharp.serving.backends.encoder import COLLECT_STATS, STATS
from sharp.serving.backends.tensors import TensorBackend
from sharp.serving.config import BackendConfig, EngineConfig
from sharp.serving.engine.guide import GuideCompiler
from sharp.serving.engine.loading import longest_context, read_checked
from sharp.serving.engine.model_folder import ModelFolder
from sharp.serving.tensors.engine import TensorEngine

# Items or numbers of a request, all rows together, and of a row unless --max-context says another limit: 8 times the
# largest set of the paper's Table 1.
MOST_TOKENS = 2**17
NUMBER_BYTES = 26  # of a float32 in JSON, as Python writes it, with a comma and a blank
WARM_UP_TOKENS = 4
KINDS = {"set": "a model of sets", "numbers": "a model of numbers"}  # of manifests, that are served so
FLOAT32 = np.dtype("<f4")  # of all their inputs and outputs


@dataclass(frozen=True)
class TensorFolder(ModelFolder):
    """What requests need to know of a model. It generates nothing. Safe to share between threads.

    `inputs` and `output` are the model's own, without statistics of attention.
    """

    inputs: tuple[Port, ...]
    output: Port

    @property
    def length_name(self) -> str:
        """What its attention runs over: items, or the length of a sequence."""
        return length_of(self.inputs)

    @property
    def context_limit(self) -> int:
        """The longest row, in items or numbers."""
        return self.longest

    @property
    def request_limit(self) -> int:
        """The most items or numbers of one request."""
        return max(MOST_TOKENS, self.longest)

    @property
    def token_bytes(self) -> int:
        """See `ModelFolder`."""
        return NUMBER_BYTES * sum(count(port.shape[1:]) for port in self.inputs)

    @property
    def how(self) -> str:
        """How it is used, for those who use it as another model."""
        return f"is {KINDS[self.manifest.kind]}: send its tensors to /v2/models/{self.manifest.name}/infer"

    def prepare(self, request: GenerateRequest) -> GenerateRequest:  # noqa: ARG002 - of the interface
        """Refuse to generate.

        Raises:
            InputError: always.
        """
        raise InputError(f"{self.manifest.name} {self.how}, or by ModelInfer of KServe's gRPC")

    def probe(self) -> TensorRequest:
        """A request that is nobody's, of one row of one item."""
        return TensorRequest(new_request_id(), zeros(self.inputs, 1), 1)

    def prepare_tensors(self, request: TensorRequest) -> TensorRequest:
        """The checked request, ready for the engine; `request.inputs` has all of the model's.

        Raises:
            FieldError: an input has another shape than the model's, too many rows or items, or is not finite.
        """
        sizes: dict[str, tuple[int, str]] = {}
        for port in self.inputs:
            self._check_shape(port, request.inputs[port.name].shape, sizes)
        name, (tokens, of) = self.length_name, sizes[self.length_name]
        if tokens > self.longest:
            raise FieldError(of, f"input {of!r} has {tokens} as its {name}; the limit is {self.longest}")
        if tokens * request.rows > self.request_limit:
            rows = f"{request.rows} rows with {tokens} as their {name}"
            raise FieldError(of, f"input {of!r} has {rows}; the limit is {self.request_limit} in all")
        for port in self.inputs:
            if not np.isfinite(request.inputs[port.name]).all():
                raise FieldError(port.name, f"input {port.name!r} has numbers that are not finite")
        return replace(request, tokens=tokens)

    def _check_shape(self, port: Port, shape: tuple[int, ...], sizes: dict[str, tuple[int, str]]) -> None:
        """Check the shape of an input; `sizes` has those of named dimensions so far, and of which input each is."""
        right = len(shape) == len(port.shape) and all(
            size > 0 if isinstance(dimension, str) else size == dimension
            for size, dimension in zip(shape, port.shape, strict=True)
        )
        if not right:
            needed = f"[{', '.join(map(str, port.shape))}]"
            raise FieldError(
                port.name, f"input {port.name!r} has shape {list(shape)}; it must be {needed}, each at least 1"
            )
        for size, dimension in zip(shape, port.shape, strict=True):
            if isinstance(dimension, str):
                known, of = sizes.setdefault(dimension, (size, port.name))
                if known != size:
                    same = f"input {of!r} has {known}; they must be the same"
                    raise FieldError(port.name, f"input {port.name!r} has {size} as its {dimension}, and {same}")


def count(dimensions: tuple[str | int, ...]) -> int:
    """Numbers in a row's item: the product of the dimensions that do not vary."""
    return int(np.prod([one for one in dimensions if isinstance(one, int)], dtype=np.int64))


def length_of(inputs: tuple[Port, ...]) -> str:
    """The dimension that varies beside the batch."""
    return next(one for port in inputs for one in port.shape[1:] if isinstance(one, str))


def zeros(inputs: tuple[Port, ...], tokens: int) -> dict[str, NDArray[np.float32]]:
    """Inputs of one row, with so many items."""
    return {
        port.name: np.zeros([1, *(tokens if isinstance(one, str) else one for one in port.shape[1:])], FLOAT32)
        for port in inputs
    }


def load_tensor_folder(
    path: Path, backend: BackendConfig, engine: EngineConfig
) -> tuple[TensorFolder, TensorBackend, TensorEngine]:
    """Load the model of a folder and make its engine.

    Raises:
        NotFoundError: there is no model folder at `path`.
        InputError: the folder cannot be used, a file is damaged, or the model failed its verification or does not run.
    """
    manifest = read_checked(path, backend)
    inputs = tuple(port for port in manifest.inputs if port.name != COLLECT_STATS)
    outputs = [port for port in manifest.outputs if port.name != STATS]
    _check_ports(path, manifest, inputs, outputs)
    longest = longest_context(manifest, engine)
    if engine.max_context is None:
        longest = min(longest, MOST_TOKENS)
    loaded = TensorBackend.load(path, manifest, outputs[0].name, backend)
    folder = TensorFolder(manifest, None, 0, GuideCompiler(manifest, None), longest, {}, inputs, outputs[0])
    _check_first_row(loaded, folder)
    return folder, loaded, TensorEngine(loaded, manifest, engine)


def _check_ports(path: Path, manifest: Manifest, inputs: tuple[Port, ...], outputs: list[Port]) -> None:
    """Raise InputError unless the server knows what the dimensions of inputs and output are."""
    batch = {port.shape[0] if port.shape else 1 for port in (*inputs, *outputs)}
    varying = {one for port in inputs for one in port.shape[1:] if isinstance(one, str)}
    known = len(outputs) == len(batch) == len(varying) == 1 and isinstance(next(iter(batch)), str)
    readable = all(port.dtype == "float32" for port in (*inputs, *outputs))
    if manifest.cache.form != "none" or not known or not readable or not batch.isdisjoint(varying):
        raise InputError(
            f"{path} holds {KINDS[manifest.kind]} whose inputs and outputs the server does not know; export it again"
        )


def _check_first_row(backend: TensorBackend, folder: TensorFolder) -> None:
    """Compute a row before anybody is served.

    Raises:
        InputError: it fails, or what it gives is not finite or of another shape than `sharp.json` says.
        DeviceLostError: the GPU is lost, which says nothing of the model.
    """
    manifest, tokens = folder.manifest, min(WARM_UP_TOKENS, folder.longest)
    try:
        values, _ = backend.run(zeros(folder.inputs, tokens), collect_stats=True)
    except DeviceLostError:
        raise
    except Exception as error:  # runtimes have no common exception
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(f"{manifest.name} does not run: {reason}; export the model again") from error
    expected = [1, *(tokens if isinstance(one, str) else one for one in folder.output.shape[1:])]
    if list(values.shape) != expected or values.dtype != FLOAT32:
        raise InputError(
            f"{manifest.name} gives {list(values.shape)} numbers for {tokens} {folder.length_name}, and sharp.json "
            f"describes {expected}; export the model again"
        )
    if not np.isfinite(values).all():
        raise InputError(
            f"{manifest.name} gives numbers that are not finite for its first row, so its weights are damaged or "
            "overflow; copy or export the model again, with --dtype float32 if it was float16"
        )
