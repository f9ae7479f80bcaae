"""`TensorInference`: inference with a model's own input and output tensors."""

import asyncio
import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sharp.core.manifest import Port
from sharp.kserve import grpc_service_pb2 as messages
from sharp.serving.api.errors import FieldError, TimeLimitError
from sharp.serving.api.request import new_request_id
from sharp.serving.api.tensors import TensorRequest
from sharp.serving.engine.served_model import TensorFunction
from sharp.serving.frontends.computed_rows import computed_rows
from sharp.serving.frontends.kserve.inference import FINAL, TIMEOUT, VERSION, TensorKind, read_parameters
from sharp.serving.frontends.kserve.statistics import Statistics
from sharp.serving.frontends.service import GenerationService
from sharp.serving.observability.request_record import RequestOrigin
from sharp.serving.tensors.folder import FLOAT32

DATATYPE = "FP32"


@dataclass(frozen=True)
class OwnTensors:
    """The inputs of a request, and the seconds after which its client gives up (None: never)."""

    inputs: Mapping[str, NDArray[np.float32]]
    seconds: float | None


class TensorInference:
    """The `Inference` of models whose inputs are tensors of numbers, not text."""

    decoupled = False

    def __init__(self, service: GenerationService, model: TensorFunction, statistics: Statistics) -> None:
        self._service = service
        self._model = model
        self._name = service.model.manifest.name
        self._statistics = statistics
        self.inputs = tuple(described(port) for port in model.inputs)
        self.outputs = (described(model.output),)

    def read(self, request: messages.ModelInferRequest, *, streams: bool) -> OwnTensors:  # noqa: ARG002 - of the interface
        """Return the inputs and the timeout of a request, which has one response, in streams too.

        Raises:
            FieldError: a tensor or a parameter is missing, unknown, of another type or out of its range.
        """
        (output,) = self.outputs
        if unknown := [listed.name for listed in request.outputs if listed.name != output.name]:
            raise FieldError(unknown[0], f"output {unknown[0]!r} is not known; the output is {output.name}")
        parameters = read_parameters(request)
        microseconds = parameters.pop(TIMEOUT, 0)
        self._service.fields.leave_out(parameters, (TIMEOUT,), "parameter {!r}")
        if not isinstance(microseconds, int) or microseconds < 0:
            raise FieldError(TIMEOUT, f"{TIMEOUT} is {microseconds!r}; it must be microseconds, a whole number")
        inputs = read_tensors(request, [kind.name for kind in self.inputs])
        return OwnTensors(inputs, microseconds / 1e6 if microseconds else None)

    async def whole(self, request_id: str, request: OwnTensors, origin: RequestOrigin) -> messages.ModelInferResponse:
        """Run a request within its timeout, and return one response with the output.

        Raises:
            TimeLimitError: the timeout has passed.
            SharpError: the request was refused or failed.
        """
        try:
            async with (
                asyncio.timeout(request.seconds),
                self._service.stream(origin, lambda: self._prepare(request)) as events,
            ):
                values, finished = await computed_rows(events)
        except TimeoutError as error:
            raise TimeLimitError(f"the request took longer than its {TIMEOUT} of {request.seconds:g} s") from error
        self._statistics.add(finished)
        (output,) = self.outputs
        tensor = messages.ModelInferResponse.InferOutputTensor
        return messages.ModelInferResponse(
            model_name=self._name,
            model_version=VERSION,
            id=request_id,
            outputs=[tensor(name=output.name, datatype=output.datatype, shape=values.shape)],
            raw_output_contents=[values.astype(FLOAT32, copy=False).tobytes()],
        )

    async def responses(
        self, request_id: str, request: OwnTensors, origin: RequestOrigin
    ) -> AsyncGenerator[messages.ModelInferResponse, None]:
        """Run a request, and yield its one response, marked as the final one."""
        whole = await self.whole(request_id, request, origin)
        whole.parameters[FINAL].bool_param = True
        yield whole

    def _prepare(self, request: OwnTensors) -> TensorRequest:
        """Return the engine's request of these tensors, with a new id."""
        return self._model.prepare_tensors(TensorRequest(new_request_id(), request.inputs))


def described(port: Port) -> TensorKind:
    """Return a tensor of the model as KServe's protocol describes it."""
    return TensorKind(port.name, DATATYPE, tuple(size if isinstance(size, int) else -1 for size in port.shape))


def read_tensors(request: messages.ModelInferRequest, known: Sequence[str]) -> dict[str, NDArray[np.float32]]:
    """Return the inputs of a request by the model's names for them, each of the shape that the request says.

    Raises:
        FieldError: an input is missing, unknown or there twice, or has another datatype, or not as many numbers as its
            shape says.
    """
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise FieldError("raw_input_contents", f"raw_input_contents has {len(raw)} of {len(request.inputs)} inputs")
    found: dict[str, NDArray[np.float32]] = {}
    for index, tensor in enumerate(request.inputs):
        name, shape = tensor.name, tuple(tensor.shape)
        if name not in known:
            raise FieldError(name, f"input {name!r} is not known; the inputs are {', '.join(known)}")
        if name in found:
            raise FieldError(name, f"input {name!r} is there twice; send it once")
        if tensor.datatype != DATATYPE:
            raise FieldError(name, f"input {name!r} has datatype {tensor.datatype!r}; it must be {DATATYPE}")
        content = raw[index] if raw else np.array(tensor.contents.fp32_contents, FLOAT32).tobytes()
        if min(shape, default=1) < 0 or len(content) != FLOAT32.itemsize * math.prod(shape):
            there = f"{len(content)} bytes" if raw else f"{len(content) // FLOAT32.itemsize} numbers"
            raise FieldError(name, f"input {name!r} has {there}, and its shape is {list(shape)} of {DATATYPE}")
        try:
            found[name] = np.frombuffer(content, FLOAT32).reshape(shape)
        except ValueError as error:  # more, or (beside an empty one) larger dimensions than an array can have
            raise FieldError(name, f"input {name!r} has a shape that no tensor has: {error}") from error
    if missing := [name for name in known if name not in found]:
        raise FieldError(missing[0], f"input {missing[0]!r} is missing; the inputs are {', '.join(known)}")
    return found
