"""A gRPC call as our servicers know it, over what Ray Serve gives a replica."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from typing import Any

import grpc
from google.protobuf import empty_pb2
from google.rpc import status_pb2
from grpc_status import rpc_status

from ray.serve.grpc_util import RayServegRPCContext
from sharp.ray.backpressure import Batch, Give, handed_over

Servicer = Callable[[Any, Any], Awaitable[Any]]


class ReplicaContext:
    """The part of `grpc.aio.ServicerContext` that our servicers use.

    Serve hands code, details and trailing metadata to its proxy with a message only. A call that ends with a status is
    therefore given an empty message to carry it, which `sharp.ray.proxy` takes out again.
    """

    def __init__(self, context: RayServegRPCContext) -> None:
        self._context = context
        self._give: Give

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        """What the client sent."""
        return self._context.invocation_metadata()

    async def send_initial_metadata(self, metadata: Iterable[tuple[str, str]]) -> None:
        """Give them to the proxy with the first message, as trailing ones: Serve knows no others."""
        self._context.set_trailing_metadata([*metadata])

    async def write(self, message: Any) -> None:
        """Send a message of a stream, when the ones before it are on their way."""
        await self._give(message)

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Iterable[tuple[str, Any]] = ()
    ) -> None:
        """End the call; every status has details of google.rpc, so that the proxy knows whose it is."""
        trailing = [(str(key), value) for key, value in trailing_metadata]
        if not trailing:
            status = rpc_status.to_status(status_pb2.Status(code=code.value[0], message=details))
            trailing = [(str(key), value) for key, value in status.trailing_metadata]
        self._context.set_code(code)
        self._context.set_details(details)
        self._context.set_trailing_metadata(trailing)
        raise grpc.aio.AbortError(details)

    async def unary(self, servicer: Servicer, request: Any) -> Any:
        """The response of `servicer`, or an empty message with the status that it ended with."""
        try:
            return await servicer(request, self)
        except grpc.aio.AbortError:
            return empty_pb2.Empty()

    def stream(self, servicer: Servicer, request: Any) -> AsyncGenerator[Batch]:
        """The messages of `servicer`, and an empty one at the end if it ended with a status."""

        async def fill(give: Give) -> None:
            self._give = give
            try:
                await servicer(request, self)
            except grpc.aio.AbortError:
                await give(empty_pb2.Empty())

        return handed_over(fill)
