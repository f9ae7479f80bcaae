"""Limits of gRPC calls: how many there are, and how long and how large the message of one may be."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from sharp.serving.api.errors import InputError, QueueFullError, SharpError
from sharp.serving.frontends.admission import most_request_bytes
from sharp.serving.frontends.grpc.authentication import OPEN_METHODS
from sharp.serving.frontends.grpc.messages import UNREADABLE
from sharp.serving.frontends.grpc.status import abort
from sharp.serving.frontends.service import GenerationService

# Without health's; a call is some 20 kB.
MOST_CALLS = 4096
# Of methods that take no prompt.
SMALL_BYTES = 2**16
WITH_PROMPT = ("/Generate", "/Tokenize", "/ModelInfer", "/ModelStreamInfer")
# Where too many messages are on their way, one that takes longer than this gives way.
PATIENCE_SECONDS = 1.0
RETRY_SECONDS = 1.0


class LimitInterceptor(grpc.aio.ServerInterceptor):
    """Reads the message of a call itself: gRPC would wait for it without end, and parse it in the event loop."""

    def __init__(self, service: GenerationService, most_bytes: int, seconds: float) -> None:
        self._service = service
        self._most_bytes = most_request_bytes(service.model, most_bytes)
        self._seconds = seconds
        self._calls = 0
        self._most_arriving = max(16, service.buffers.most // self._most_bytes)
        # When each message began to arrive, and what ends the wait for it; the oldest first.
        self._arriving: dict[asyncio.Timeout, float] = {}
        self._turn = asyncio.Lock()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: Any,
    ) -> Any:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = str(handler_call_details.method)
        counts = not method.startswith(OPEN_METHODS)
        if handler.request_streaming:
            return self._of_stream(handler) if counts else handler
        limit = self._most_bytes if method.endswith(WITH_PROMPT) else SMALL_BYTES
        behaviour = handler.unary_stream if handler.response_streaming else handler.unary_unary

        async def serve(requests: AsyncIterator[bytes], context: Any) -> Any:
            self._calls += counts
            try:
                with self._service.buffers.hold() as held:
                    try:
                        self._check_calls(counts)
                        held.add(await self._read(requests, limit, waits=counts))
                        request = await self._parsed(handler.request_deserializer, held.take())
                    except SharpError as error:
                        return await abort(context, error)
                    return await behaviour(request, context)
            finally:
                self._calls -= counts

        # On the wire one message and a stream of one are the same.
        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return make(serve, None, handler.response_serializer)

    def _of_stream(self, handler: Any) -> Any:
        """A handler of a stream of messages, which counts as a call."""
        behaviour = handler.stream_stream

        async def serve(requests: AsyncIterator[Any], context: Any) -> Any:
            self._calls += 1
            try:
                try:
                    self._check_calls(True)
                except SharpError as error:
                    return await abort(context, error)
                responses = behaviour(requests, context)
                if not isinstance(responses, AsyncIterator):
                    return await responses
                async for one in responses:  # reflection's
                    await context.write(one)
            finally:
                self._calls -= 1

        return grpc.stream_stream_rpc_method_handler(
            serve,
            handler.request_deserializer,
            handler.response_serializer,
        )

    def _check_calls(self, counts: bool) -> None:
        if counts and self._calls > MOST_CALLS:
            message = f"{MOST_CALLS} calls run, the limit; try again in {RETRY_SECONDS:g} s"
            raise QueueFullError(message, RETRY_SECONDS)

    async def _read(self, requests: AsyncIterator[bytes], limit: int, *, waits: bool) -> bytes:
        """The message of a call.

        Raises:
            InputError: it does not come in time, or is too large.
            QueueFullError: too many others are on their way.
        """
        if waits:
            async with self._turn:
                await self._until_room()
        try:
            async with asyncio.timeout(self._seconds) as ends:
                if waits:
                    self._arriving[ends] = time.monotonic()
                message = await anext(aiter(requests), None)
        except TimeoutError as error:
            if waits and ends not in self._arriving:
                text = "too many messages are on their way, and this one took too long; try again"
                raise QueueFullError(text, RETRY_SECONDS) from error
            raise InputError(f"the message of the call did not come within {self._seconds:g} s") from error
        finally:
            self._arriving.pop(ends, None)
        if message is None:
            raise InputError("the call has no message")
        if len(message) > limit:
            raise InputError(f"the message has {len(message)} bytes; the limit of this method is {limit}")
        return message

    async def _until_room(self) -> None:
        while len(self._arriving) >= self._most_arriving:
            oldest, began = next(iter(self._arriving.items()))
            if time.monotonic() - began >= PATIENCE_SECONDS:
                del self._arriving[oldest]
                oldest.reschedule(asyncio.get_running_loop().time())
            else:
                await asyncio.sleep(0.01)

    async def _parsed(self, parse: Callable[[bytes], Any], message: bytes) -> Any:
        try:
            if len(message) <= SMALL_BYTES:
                return parse(message)
            return await self._service.parsing.run(lambda: parse(message))
        except DecodeError as error:
            raise InputError(UNREADABLE) from error
