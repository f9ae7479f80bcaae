"""`TensorFolder`: the folder of a model of sets or of numbers, loaded and ready for requests."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sharp.core.errors import InputError
from sharp.core.manifest import Manifest, Port
from sharp.serving.api.errors import FieldError
from sharp.serving.api.request import new_request_id
from sharp.serving.api.tensors import TensorRequest
from sharp.serving.backends.rows import COLLECT_STATS, STATS, RowBackend
from sharp.serving.config import BackendConfig, EngineConfig
from sharp.serving.engine.first_output import check_first_row
from sharp.serving.engine.loading import longest_context, read_checked
from sharp.serving.engine.served_model import Abilities
from sharp.serving.tensors.engine import TensorEngine

# Maximum items or numbers of a request, over all rows, and of a row unless --max-context sets another limit: 8 times
# the largest set of the paper's Table 1.
MOST_TOKENS = 2**17
NUMBER_BYTES = 26  # characters of a float32 in JSON as Python writes it, with a comma and a blank
WARM_UP_TOKENS = 4
KINDS = {"set": "a model of sets", "numbers": "a model of numbers"}  # kinds of manifests that `TensorFolder` serves
FLOAT32 = np.dtype("<f4")  # type of all inputs and outputs


@dataclass(frozen=True)
class TensorFolder:
    """A loaded model of sets or of numbers as requests see it. Thread-safe.

    `longest` is the length of the longest row, in items or numbers. `inputs` and `output` are the model's own, without
    the ports of attention statistics.
    """

    manifest: Manifest
    longest: int
    inputs: tuple[Port, ...]
    output: Port

    @property
    def tokenizer(self) -> None:
        """The tokenizer: None, because the model reads no text."""

    @property
    def length_name(self) -> str:
        """The name of the dimension that attention runs over: the items of a set, or the length of a sequence."""
        return length_of(self.inputs)

    @property
    def context_limit(self) -> int:
        """The length of the longest row, in items or numbers."""
        return self.longest

    @property
    def request_limit(self) -> int:
        """The maximum number of items or numbers of one request."""
        return max(MOST_TOKENS, self.longest)

    @property
    def token_bytes(self) -> int:
        """The maximum number of bytes per item in a request's message."""
        return NUMBER_BYTES * sum(count(port.shape[1:]) for port in self.inputs)

    @property
    def abilities(self) -> Abilities:
        """The ability to compute tensors."""
        name = self.manifest.name
        what = f"{name} is {KINDS[self.manifest.kind]}: send its tensors to /v2/models/{name}/infer"
        return Abilities(tensors=self, instead=f"{what}, or by ModelInfer of KServe's gRPC")

    def probe(self) -> TensorRequest:
        """Return a request of one row with one item that belongs to no client, for health checks."""
        return TensorRequest(new_request_id(), zeros(self.inputs, 1), 1)

    def prepare_tensors(self, request: TensorRequest) -> TensorRequest:
        """Return the checked request, ready for the engine. `request.inputs` must have all inputs of the model.

        Raises:
            FieldError: an input has another shape than the model's, too many rows or items, or numbers that are not
                finite.
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
                raise FieldError(port.name, f"input {port.name!r} has numbers that are not finite; send finite ones")
        return replace(request, tokens=tokens)

    def _check_shape(self, port: Port, shape: tuple[int, ...], sizes: dict[str, tuple[int, str]]) -> None:
        """Check the shape of the input `port`.

        `sizes` holds, for each named dimension found so far, its size and the input that it was found in.

        Raises:
            FieldError: the shape is not the model's, or a dimension has another size than in an earlier input.
        """
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
    """Return the number of values in one item: the product of the fixed dimensions."""
    return int(np.prod([size for size in dimensions if isinstance(size, int)], dtype=np.int64))


def length_of(inputs: tuple[Port, ...]) -> str:
    """Return the name of the dimension that varies besides the batch; there must be one."""
    return next(size for port in inputs for size in port.shape[1:] if isinstance(size, str))


def zeros(inputs: tuple[Port, ...], tokens: int) -> dict[str, NDArray[np.float32]]:
    """Return inputs of zeros for one row of `tokens` items."""
    return {
        port.name: np.zeros([1, *(tokens if isinstance(size, str) else size for size in port.shape[1:])], FLOAT32)
        for port in inputs
    }


def load_tensor_folder(
    path: Path, backend: BackendConfig, engine: EngineConfig
) -> tuple[TensorFolder, RowBackend, TensorEngine]:
    """Load the model of a folder and create its engine.

    Raises:
        NotFoundError: there is no model folder at `path`.
        InputError: the folder cannot be used, a file is damaged, or the model failed its verification or does not run.
        DeviceLostError: the GPU is lost.
    """
    manifest = read_checked(path, backend)
    inputs = tuple(port for port in manifest.inputs if port.name != COLLECT_STATS)
    outputs = [port for port in manifest.outputs if port.name != STATS]
    _check_ports(path, manifest, inputs, outputs)
    longest = longest_context(manifest, engine)
    if engine.max_context is None:
        longest = min(longest, MOST_TOKENS)
    loaded = RowBackend.load(path, manifest, [port.name for port in inputs], outputs[0].name, backend)
    folder = TensorFolder(manifest, longest, inputs, outputs[0])
    tokens = min(WARM_UP_TOKENS, longest)
    expected = (1, *(tokens if isinstance(size, str) else size for size in folder.output.shape[1:]))
    check_first_row(loaded, manifest, zeros(inputs, tokens), expected, f"{tokens} {folder.length_name}")
    return folder, loaded, TensorEngine(loaded, manifest, engine)


def _check_ports(path: Path, manifest: Manifest, inputs: tuple[Port, ...], outputs: list[Port]) -> None:
    """Raise InputError unless the server knows the meaning of all dimensions of the inputs and the output."""
    batch = {port.shape[0] if port.shape else 1 for port in (*inputs, *outputs)}
    varying = {size for port in inputs for size in port.shape[1:] if isinstance(size, str)}
    known = len(outputs) == len(batch) == len(varying) == 1 and isinstance(next(iter(batch)), str)
    readable = all(port.dtype == "float32" for port in (*inputs, *outputs))
    if manifest.cache.form != "none" or not known or not readable or not batch.isdisjoint(varying):
        raise InputError(
            f"{path} holds {KINDS[manifest.kind]} whose inputs and outputs the server does not know; export it again"
        )
