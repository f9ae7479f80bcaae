"""Limits of gRPC calls: their number, and the time and size of each message."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from sharp.serving.api.errors import InputError, QueueFullError, SharpError
from sharp.serving.frontends.admission import most_request_bytes
from sharp.serving.frontends.grpc.messages import UNREADABLE
from sharp.serving.frontends.grpc.status import Context, abort, origin_of
from sharp.serving.frontends.service import GenerationService
from sharp.serving.security.address import network_of
from sharp.serving.security.caller import host_of_peer
from sharp.serving.security.open_access import GRPC_OPEN_METHODS, MOST_HEALTH_CALLS

# Calls of methods that need no token do not count. A call takes some 20 kB of memory.
MOST_CALLS = 4096
# The largest message of a method that takes no prompt.
SMALL_BYTES = 2**16
WITH_PROMPT = ("/Generate", "/Tokenize", "/ModelInfer", "/ModelStreamInfer")
# When too many messages are arriving, the oldest is refused once it has taken longer than this.
PATIENCE_SECONDS = 1.0
RETRY_SECONDS = 1.0


class OpenCalls:
    """A limit of simultaneous calls. Beyond the limit, the oldest call of the network with most calls ends.

    So a client that opens many calls ends its own calls, and the single call of a probe continues.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0
        self._networks: dict[str, dict[asyncio.Timeout, None]] = {}

    @asynccontextmanager
    async def hold(self, host: str) -> AsyncIterator[None]:
        """Count a call of a client at the address `host` while the block runs.

        Raises:
            QueueFullError: the call gives way to a newer one.
        """
        while self._count >= self._most:
            self._end_one()
        calls, network = self._networks, network_of(host)
        ends = asyncio.timeout(None)
        try:
            async with ends:
                calls.setdefault(network, {})[ends] = None
                self._count += 1
                try:
                    yield
                finally:
                    self._remove(network, ends)
        except TimeoutError as error:
            if not ends.expired():
                raise
            raise QueueFullError(f"{self._most} calls of health run, the limit; ask again", RETRY_SECONDS) from error

    def _end_one(self) -> None:
        """End the oldest call of the network that has most calls."""
        network = max(self._networks, key=lambda name: len(self._networks[name]))
        ends = next(iter(self._networks[network]))
        self._remove(network, ends)
        ends.reschedule(asyncio.get_running_loop().time())

    def _remove(self, network: str, ends: asyncio.Timeout) -> None:
        """Forget a call, which is known by its timeout `ends`, if it is still open."""
        calls = self._networks.get(network, {})
        if ends in calls:
            del calls[ends]
            self._count -= 1
            if not calls:
                del self._networks[network]


class LimitInterceptor(grpc.aio.ServerInterceptor):
    """An interceptor that reads the message of a call. gRPC itself would wait without end, and block the event loop."""

    def __init__(self, service: GenerationService, most_bytes: int, seconds: float) -> None:
        self._service = service
        self._most_bytes = most_request_bytes(service.model, most_bytes)
        self._seconds = seconds
        self._calls = 0
        self._open_calls = OpenCalls(MOST_HEALTH_CALLS)
        self._most_arriving = max(16, service.buffers.most // self._most_bytes)
        # The time at which each message began to arrive, by the timeout that ends its arrival; the oldest first.
        self._arriving: dict[asyncio.Timeout, float] = {}
        self._turn = asyncio.Lock()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: Any,
    ) -> Any:
        """Return a handler that reads the message within its limits before it calls the method's own."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = str(handler_call_details.method)
        counts = method not in GRPC_OPEN_METHODS
        if handler.request_streaming:
            return self._of_stream(handler) if counts else handler
        limit = self._most_bytes if method.endswith(WITH_PROMPT) else SMALL_BYTES
        behaviour = handler.unary_stream if handler.response_streaming else handler.unary_unary

        async def serve_open(requests: AsyncIterator[bytes], context: Any) -> Any:
            """Serve a call that may stay open; it counts among the open calls of its network."""
            try:
                async with self._open_calls.hold(host_of_peer(context.peer())):
                    return await serve(requests, context)
            except QueueFullError as error:
                return await abort(context, error)

        async def serve(requests: AsyncIterator[bytes], context: Any) -> Any:
            """Read and parse the one request of a call within the limits, then call the method."""
            self._calls += counts
            try:
                with self._service.buffers.hold() as held:
                    try:
                        self._check_calls(counts)
                        held.add(await self._read(requests, limit, waits=counts))
                        request = await self._parsed(handler.request_deserializer, held.take(), context)
                    except SharpError as error:
                        return await abort(context, error)
                    return await behaviour(request, context)
            finally:
                self._calls -= counts

        # On the wire a single message and a stream of one message are the same.
        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return make(serve if counts else serve_open, None, handler.response_serializer)

    def _of_stream(self, handler: Any) -> Any:
        """Return a handler that runs `handler` of a method with a stream of requests, and counts as one open call.

        Beyond the limit of calls it ends with an error.
        """
        behaviour = handler.stream_stream

        async def serve(requests: AsyncIterator[Any], context: Any) -> Any:
            """Call a method with a stream of requests, within the limit of calls."""
            self._calls += 1
            try:
                try:
                    self._check_calls(True)
                except SharpError as error:
                    return await abort(context, error)
                responses = behaviour(requests, context)
                if not isinstance(responses, AsyncIterator):
                    return await responses
                async for response in responses:  # of the reflection service
                    await context.write(response)
            finally:
                self._calls -= 1

        return grpc.stream_stream_rpc_method_handler(
            serve,
            handler.request_deserializer,
            handler.response_serializer,
        )

    def _check_calls(self, counts: bool) -> None:
        """Raise QueueFullError if the call counts and too many calls run."""
        if counts and self._calls > MOST_CALLS:
            message = f"{MOST_CALLS} calls run, the limit; try again in {RETRY_SECONDS:g} s"
            raise QueueFullError(message, RETRY_SECONDS)

    async def _read(self, requests: AsyncIterator[bytes], limit: int, *, waits: bool) -> bytes:
        """Return the message of a call, of at most `limit` bytes.

        If it `waits`, it first waits for room among the messages that arrive, and may later be ended to make room.

        Raises:
            InputError: the message does not come in time, or is too large.
            QueueFullError: too many other messages are arriving.
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
        """Wait until few enough messages are arriving; the oldest is ended once it took `PATIENCE_SECONDS`."""
        while len(self._arriving) >= self._most_arriving:
            oldest, began = next(iter(self._arriving.items()))
            if time.monotonic() - began >= PATIENCE_SECONDS:
                del self._arriving[oldest]
                oldest.reschedule(asyncio.get_running_loop().time())
            else:
                await asyncio.sleep(0.01)

    async def _parsed(self, parse: Callable[[bytes], Any], message: bytes, context: Context) -> Any:
        """Parse a request message, a large one in a thread. InputError if it is not valid protobuf."""
        try:
            if len(message) <= SMALL_BYTES:
                return parse(message)
            return await self._service.parsing.run(lambda: parse(message), origin_of(context, "grpc").client)
        except DecodeError as error:
            raise InputError(UNREADABLE) from error
