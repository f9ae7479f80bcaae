"""A small client: one call, and errors as the exceptions that the server raised."""

from collections.abc import Iterator

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from sharp.serving.config import MIB
from sharp.serving.errors import (
    AlreadyExistsError,
    InputError,
    NotFoundError,
    QueueFullError,
    SharpError,
    SlowReaderError,
)
from sharp.v1 import inference_pb2, inference_pb2_grpc

ERRORS: dict[grpc.StatusCode, type[SharpError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InputError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExistsError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: SlowReaderError,
}
MESSAGE_LIMITS = (("grpc.max_receive_message_length", 64 * MIB), ("grpc.max_send_message_length", 64 * MIB))


def generate(
    address: str, request: inference_pb2.GenerateRequest, timeout: float | None = None
) -> Iterator[inference_pb2.GenerateResponse]:
    """Stream the answer to a request from the server at `address`, `host:port`.

    Raises:
        SharpError: nobody answers there, or the server's own error.
    """
    with grpc.insecure_channel(address, MESSAGE_LIMITS) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Generate(request, timeout=timeout)
        answered = False
        try:
            for response in call:
                answered = True
                yield response
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNAVAILABLE and rpc_status.from_call(error) is None:
                missing = "went away before the answer was complete" if answered else "does not answer"
                raise SharpError(f"the server at {address} {missing}; start one with sharp-serve") from error
            raise _error(error) from error
        finally:
            call.cancel()


def _error(error: grpc.RpcError) -> SharpError:
    """The server's error."""
    message = error.details() or error.code().name
    status = rpc_status.from_call(error)
    retry = error_details_pb2.RetryInfo()
    if status and any(detail.Unpack(retry) for detail in status.details):
        return QueueFullError(message, retry.retry_delay.ToMilliseconds() / 1000)
    return ERRORS.get(error.code(), SharpError)(message)
