"""Refusal of stream messages that are no protobuf of their type: INVALID_ARGUMENT, and no traceback in the log."""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from sharp.serving.api.errors import InputError
from sharp.serving.frontends.grpc.status import abort

UNREADABLE = "the message cannot be read as protobuf of its type; use the .proto files of this server"
MALFORMED = object()


class MessageInterceptor(grpc.aio.ServerInterceptor):
    """An interceptor that hides unreadable messages from handlers. grpc itself returns INTERNAL and logs a page."""

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """Return the handler of the call, which for a stream of requests gives the method only readable messages.

        The method runs before any message is read. When it reads an unreadable message, the call ends with
        INVALID_ARGUMENT. Handlers of single requests are returned unchanged.
        """
        handler = await continuation(handler_call_details)
        if handler is None or not handler.request_streaming:  # `LimitInterceptor` reads single messages
            return handler
        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        handle = handler.stream_unary or handler.stream_stream
        return make(_checked_messages(handle), _reader(handler.request_deserializer), handler.response_serializer)


def _reader(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Return `deserialize` with `MALFORMED` as the result for bytes that are not valid protobuf."""

    def read(content: bytes) -> Any:
        """Return the message, or MALFORMED."""
        try:
            return deserialize(content)
        except DecodeError:
            return MALFORMED

    return read


def _checked_messages(handle: Any) -> Any:
    """Return a handler of a stream that gives only readable messages to `handle`."""

    async def respond(requests: AsyncIterator[Any], context: Any) -> Any:
        """Call the method with the readable requests."""
        return await handle(_readable(requests, context), context)

    async def generate(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """Yield the method's responses to the readable requests."""
        async for message in handle(_readable(requests, context), context):
            yield message

    return generate if inspect.isasyncgenfunction(handle) else respond


async def _readable(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
    """Yield the requests of a stream; abort the call with INVALID_ARGUMENT at a malformed one."""
    async for request in requests:
        if request is MALFORMED:
            await abort(context, InputError(UNREADABLE))
        yield request
