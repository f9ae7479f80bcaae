"""`ReplicaContext`: the context of a gRPC call for Sharp's servicers, made of what Ray Serve gives a replica."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from typing import Any

import grpc
from google.protobuf import empty_pb2
from google.rpc import status_pb2
from grpc_status import rpc_status

from ray.serve.grpc_util import RayServegRPCContext
from sharp.ray.backpressure import Give, MessageBatch, handed_over

Servicer = Callable[[Any, Any], Awaitable[Any]]


class ReplicaContext:
    """The part of `grpc.aio.ServicerContext` that Sharp's servicers use.

    Serve hands code, details and trailing metadata to its proxy only together with a message. A call that ends with a
    status therefore sends an empty message to carry it, which `sharp.ray.proxy` takes out again.
    """

    def __init__(self, context: RayServegRPCContext) -> None:
        self._context = context
        self._give: Give

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        """Return the metadata that the client sent, as pairs of key and value."""
        return self._context.invocation_metadata()

    def peer(self) -> str:
        """Return the address of the client as Serve's proxy reports it."""
        return self._context.peer()

    async def send_initial_metadata(self, metadata: Iterable[tuple[str, str]]) -> None:
        """Set metadata that reach the proxy with the first message, as trailing metadata, because Serve has no other.

        Call this method before the first message. It replaces metadata that were set before.
        """
        self._context.set_trailing_metadata([*metadata])

    async def write(self, message: Any) -> None:
        """Send a message of a stream, after waiting while too many earlier messages are unread.

        Only a servicer that `stream` runs may write.
        """
        await self._give(message)

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Iterable[tuple[str, Any]] = ()
    ) -> None:
        """End the call with a status and details of google.rpc, by which the proxy knows the status from Serve's own.

        Without `trailing_metadata`, the details consist of the code and the message.

        Raises:
            grpc.aio.AbortError: always; `unary` and `stream` catch it.
        """
        trailing = [(str(key), value) for key, value in trailing_metadata]
        if not trailing:
            status = rpc_status.to_status(status_pb2.Status(code=code.value[0], message=details))
            trailing = [(str(key), value) for key, value in status.trailing_metadata]
        self._context.set_code(code)
        self._context.set_details(details)
        self._context.set_trailing_metadata(trailing)
        raise grpc.aio.AbortError(details)

    async def unary(self, servicer: Servicer, request: Any) -> Any:
        """Return the response of `servicer`, or an empty message with the status that the call ended with."""
        try:
            return await servicer(request, self)
        except grpc.aio.AbortError:
            return empty_pb2.Empty()

    def stream(self, servicer: Servicer, request: Any) -> AsyncGenerator[MessageBatch]:
        """Return a generator of batches of the messages that `servicer` writes, with an empty one after an abort."""

        async def fill(give: Give) -> None:
            """Run the RPC, which passes each message to `give`; an aborted RPC gives an empty message."""
            self._give = give
            try:
                await servicer(request, self)
            except grpc.aio.AbortError:
                await give(empty_pb2.Empty())

        return handed_over(fill)
