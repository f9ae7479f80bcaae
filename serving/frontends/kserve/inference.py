"""`Inference`: how a kind of model reads KServe's requests and responds to them."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sharp.kserve import grpc_service_pb2 as messages
from sharp.serving.observability.request_record import RequestOrigin

VERSION = "1"
FINAL = "triton_final_response"
TIMEOUT = "timeout"  # a parameter of the clients' infer, in microseconds
# Parameters of clients that change nothing: the first is always true here, the second is for tensors over HTTP.
CLIENT_PARAMETERS = ("triton_enable_empty_final_response", "binary_data")


@dataclass(frozen=True)
class TensorKind:
    """An input or output as KServe's protocol describes it; -1 is a dimension that varies."""

    name: str
    datatype: str
    shape: tuple[int, ...] = (1,)
    optional: bool = False


class Inference(Protocol):
    """The requests and responses of a kind of model. `read` runs in a thread; the other methods get its result."""

    @property
    def inputs(self) -> Sequence[TensorKind]:
        """The input tensors that a request may have."""

    @property
    def outputs(self) -> Sequence[TensorKind]:
        """The output tensors that a response may have."""

    @property
    def decoupled(self) -> bool:
        """Whether a request may have several responses."""

    def read(self, request: messages.ModelInferRequest, *, streams: bool) -> Any:
        """Return the request of a message; `streams` says whether it may have several responses.

        Raises:
            FieldError: a tensor or a parameter is missing, unknown, of another type or out of its range.
        """

    async def whole(self, request_id: str, request: Any, origin: RequestOrigin) -> messages.ModelInferResponse:
        """Run a request, and return one response with all outputs.

        Raises:
            SharpError: the request was refused or failed.
        """

    def responses(
        self, request_id: str, request: Any, origin: RequestOrigin
    ) -> AsyncGenerator[messages.ModelInferResponse, None]:
        """Run a request, and yield the responses as they come.

        Raises:
            SharpError: the request was refused or failed.
        """


def read_parameters(request: messages.ModelInferRequest) -> dict[str, Any]:
    """Return the parameters of a request, without those that clients set for themselves."""
    return {
        name: getattr(value, value.WhichOneof("parameter_choice") or "string_param")
        for name, value in request.parameters.items()
        if name not in CLIENT_PARAMETERS
    }
