"""`Inference`: what models of a kind read from KServe's requests, and how they respond."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sharp.kserve import grpc_service_pb2 as messages
from sharp.serving.observability.request_record import RequestOrigin

VERSION = "1"
FINAL = "triton_final_response"
TIMEOUT = "timeout"  # of the clients' infer, in microseconds
# Of the clients: always the case here, and how tensors go over HTTP.
CLIENT_PARAMETERS = ("triton_enable_empty_final_response", "binary_data")


@dataclass(frozen=True)
class TensorKind:
    """An input or output as the protocol describes it; -1 is a dimension that varies."""

    name: str
    datatype: str
    shape: tuple[int, ...] = (1,)
    optional: bool = False


class Inference(Protocol):
    """Requests are read in a thread; what `read` returns is given to one of the others."""

    @property
    def inputs(self) -> Sequence[TensorKind]:
        """What a request may have."""

    @property
    def outputs(self) -> Sequence[TensorKind]:
        """What a response may have."""

    @property
    def decoupled(self) -> bool:
        """Whether a request may have several responses."""

    def read(self, request: messages.ModelInferRequest, *, streams: bool) -> Any:
        """The request of a message; `streams` says whether it may have several responses.

        Raises:
            FieldError: a tensor or a parameter is missing, unknown, of another type or out of its range.
        """

    async def whole(self, request_id: str, request: Any, origin: RequestOrigin) -> messages.ModelInferResponse:
        """The response with all of it."""

    def responses(
        self, request_id: str, request: Any, origin: RequestOrigin
    ) -> AsyncGenerator[messages.ModelInferResponse, None]:
        """The responses as they come."""


def read_parameters(request: messages.ModelInferRequest) -> dict[str, Any]:
    """The parameters of a request that are not the client's own."""
    return {
        name: getattr(value, value.WhichOneof("parameter_choice") or "string_param")
        for name, value in request.parameters.items()
        if name not in CLIENT_PARAMETERS
    }
