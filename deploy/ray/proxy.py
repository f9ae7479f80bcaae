"""Sharp's services in Serve's gRPC proxies: `grpc_servicer_functions: ["sharp.ray.proxy:add_services"]`.

Serve replaces the behaviour of every method by its own, which sends the call to a replica. This module adds two things:
a call is given its model and the beginning of its prompt to be routed by, and a status of Serve's own becomes a status
that clients can act on. Serve says INTERNAL when a replica is lost; clients get UNAVAILABLE with RetryInfo instead.
`grpc.health.v1` is served here, by what Serve's own health says of this proxy. Every request of KServe's
ModelStreamInfer is a call of its own, which goes to the replica that suits it.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2

from ray.serve.generated import serve_pb2
from sharp.kserve import grpc_service_pb2
from sharp.ray.backpressure import unpacked
from sharp.ray.request import model_of, prefix_key
from sharp.serving.api.errors import NotFoundError, QueueFullError, SharpError, SlowReaderError, UnavailableError
from sharp.serving.frontends.grpc.concurrency import respond_concurrently
from sharp.serving.frontends.grpc.status import abort, write
from sharp.serving.frontends.kserve.model import stream_error
from sharp.v1 import control_pb2, inference_pb2

SERVICES = (
    inference_pb2.DESCRIPTOR.services_by_name["InferenceService"],
    control_pb2.DESCRIPTOR.services_by_name["ControlService"],
    grpc_service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"],
)
KINDS = {  # by whether the requests and the responses are streams
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
HEALTH_SERVICES = ("", *(service.full_name for service in SERVICES))
RETRY_SECONDS = 1.0
STATUS_DETAILS = "grpc-status-details-bin"
SERVE_REQUEST_ID = "request_id"
HEALTH_SECONDS = 1.0
SERVE_HEALTH = "/ray.serve.RayServeAPIService/Healthz"


def add_services(_servicer: Any, server: grpc.aio.Server) -> None:
    """Add the services of `sharp.v1`, KServe's and `grpc.health.v1` to the gRPC server of a proxy of Ray Serve.

    Serve passes `_servicer` as to functions that grpc generates. This function does not use it.
    """
    for service in SERVICES:
        server.add_generic_rpc_handlers((_Handlers(service),))
    server.add_generic_rpc_handlers((_ProxyHealth(),))


class _Handlers(grpc.GenericRpcHandler):
    """The gRPC handlers of one service in a proxy of Ray Serve.

    Serve puts its own functions, which call a replica, into `_method_handlers`; `service` wraps these for each call.
    """

    def __init__(self, service: ServiceDescriptor) -> None:
        # Serve replaces this dictionary by its name, which is the one that grpc's own handler has.
        self._method_handlers: dict[str, Any] = {}
        for method in service.methods:
            kind = KINDS[method.client_streaming, method.server_streaming]
            read = GetMessageClass(method.input_type).FromString
            self._method_handlers[f"/{service.full_name}/{method.name}"] = kind(_no_behaviour, read)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Return the handler of a method, with routing and statuses around Serve's behaviour; None for others."""
        handler = self._method_handlers.get(handler_call_details.method)
        if handler is None:
            return None

        async def unary(request: Any, context: Any) -> bytes:
            """Route a unary call to a replica and return the response's bytes."""
            response: bytes = await handler.unary_unary(request, _Routed(context, request))
            await _end(context)
            return response

        async def stream(request: Any, context: Any) -> None:
            """Route a call with a stream of responses to a replica, and write its messages."""
            routed, started = _Routed(context, request), False
            async with aclosing(_messages(handler.unary_stream(request, routed))) as messages:
                async for message in messages:
                    if not started:
                        await context.send_initial_metadata(routed.initial)
                    started = True
                    await _write(context, message)
            await _end(context)

        async def streams(requests: AsyncIterator[Any], context: Any) -> None:
            """Route each request of a stream by itself, and write the responses as they come."""

            async def responses(request: Any) -> AsyncGenerator[bytes]:
                """Yield the responses to one request of the stream, and at the end its error, if any."""
                own = _InnerContext(_Routed(context, request))
                async with aclosing(_messages(handler.unary_stream(request, own))) as messages:
                    async for message in messages:
                        yield message
                if own.code() != grpc.StatusCode.OK:
                    why = str(_error(own) or own.details())
                    yield stream_error(request, why, request.model_name).SerializeToString()

            await respond_concurrently(requests, responses, partial(_write, context))

        return handler._replace(unary_unary=unary, unary_stream=stream, stream_stream=streams)


async def _write(context: Any, message: bytes) -> None:
    """Write a message of a stream to the client; if the client has stopped reading, end the call."""
    try:
        await write(context, message)
    except SlowReaderError as error:
        await abort(context, error)


async def _messages(serving: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """Yield the messages of one call from a replica, unpacked from its batches and without empty messages.

    An empty message only carries the status of the call. Nothing is read ahead. Closing the generator cancels the call
    in the replica.
    """
    try:
        async for batch in serving:
            for message in unpacked(batch):
                if message:  # an empty message only carries the status, before which nothing must be sent
                    yield message
    except GeneratorExit:
        await asyncio.wait([asyncio.create_task(_cancel(serving))])
        raise


async def _cancel(serving: AsyncGenerator[bytes]) -> None:
    """Cancel Serve where it waits for the next message, because only there does it cancel the replica's call."""
    task = asyncio.current_task()
    assert task is not None
    task.cancel()  # takes effect at the next wait
    async for _ in serving:
        pass


class _Context:
    """The context of a gRPC call as Serve sees it; all but `peer` is the call's own.

    After the call Serve asks for the peer once more, for its log. grpc would then read memory that may be freed.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self._peer = context.peer()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def peer(self) -> str:
        """Return the peer as it was at the beginning of the call."""
        return str(self._peer)


class _ProxyHealth(grpc.GenericRpcHandler):
    """`grpc.health.v1`: a proxy serves once it knows its replicas, and until it is drained."""

    def __init__(self) -> None:
        # Serve puts its own health behind this name, as it does with the methods of `_Handlers`.
        ask: Any = grpc.unary_unary_rpc_method_handler(_no_behaviour)
        self._method_handlers = {SERVE_HEALTH: ask}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Return the handler of Check or Watch; None for other methods."""
        read, write = health_pb2.HealthCheckRequest.FromString, health_pb2.HealthCheckResponse.SerializeToString
        if handler_call_details.method == "/grpc.health.v1.Health/Check":
            return grpc.unary_unary_rpc_method_handler(self._check, read, write)
        if handler_call_details.method == "/grpc.health.v1.Health/Watch":
            return grpc.unary_stream_rpc_method_handler(self._watch, read, write)
        return None

    async def _check(self, request: Any, context: Any) -> Any:
        """Respond to Check of gRPC's health protocol. An unknown service aborts with NOT_FOUND."""
        if request.service not in HEALTH_SERVICES:
            await abort(context, NotFoundError(f"service {request.service!r} is not served here"))
        return health_pb2.HealthCheckResponse(status=await self._status(context))

    async def _watch(self, request: Any, context: Any) -> AsyncGenerator[Any]:
        """Yield the status at the start and at each change. An unknown service has the status SERVICE_UNKNOWN."""
        known = request.service in HEALTH_SERVICES
        told = None
        while True:
            status = await self._status(context) if known else health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            if status != told:
                told = status
                yield health_pb2.HealthCheckResponse(status=status)
            await asyncio.sleep(HEALTH_SECONDS)

    async def _status(self, context: Any) -> Any:
        """Return SERVING if Ray Serve's own health check of this proxy succeeds, else NOT_SERVING."""
        inner = _InnerContext(context)
        # Serve's base class sets the handler and does not declare it.
        await self._method_handlers[SERVE_HEALTH].unary_unary(serve_pb2.HealthzRequest(), inner)  # type: ignore[attr-defined]
        status = health_pb2.HealthCheckResponse
        return status.SERVING if inner.code() == grpc.StatusCode.OK else status.NOT_SERVING


class _InnerContext(_Context):
    """The context of a call that the proxy itself makes to Serve, such as a health check or one request of a stream.

    It keeps the status and the trailing metadata that Serve sets, so that these do not end the client's call.
    """

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._code: Any = 0  # Serve sets a code that is false
        self._details = ""
        self._trailing: Any = ()

    def set_code(self, code: Any) -> None:
        """Keep the status code that Serve sets, away from the client's call."""
        self._code = code

    def code(self) -> Any:
        """Return the status code that Serve has set; 0 before that."""
        return self._code

    def set_details(self, details: str) -> None:
        """Keep the message of the status that Serve sets, away from the client's call."""
        self._details = details

    def details(self) -> str:
        """Return the message of the status that Serve has set; empty before that."""
        return self._details

    def set_trailing_metadata(self, metadata: Any) -> None:
        """Keep the trailing metadata that Serve sets, away from the client's call."""
        self._trailing = metadata

    def trailing_metadata(self) -> Any:
        """Return the trailing metadata that was set."""
        return self._trailing


def _no_behaviour(_request: Any, _context: Any) -> Any:
    """Raise NotImplementedError. This stands in a gRPC handler until Serve puts its own function in its place."""
    raise NotImplementedError


class _Routed(_Context):
    """The context of a call with the metadata by which Serve routes: the model and the session of the request.

    Metadata of these names from the client are kept. A replica can set trailing metadata only. If a call ends without a
    status of the replica's, they are meant as initial metadata (`ReplicaContext`) and kept in `initial`, except the
    request id that Serve adds to them.
    """

    def __init__(self, context: Any, request: Any) -> None:
        super().__init__(context)
        given = {str(name): value for name, value in context.invocation_metadata() or ()}
        routing = {"multiplexed_model_id": model_of(request), "session_id": prefix_key(request)}
        self._metadata = [*({name: value for name, value in routing.items() if value} | given).items()]
        self.initial: tuple[tuple[str, Any], ...] = ()

    def invocation_metadata(self) -> Sequence[tuple[str, Any]]:
        """Return the client's metadata, with those added by which Serve routes."""
        return self._metadata

    def set_trailing_metadata(self, metadata: Iterable[tuple[str, Any]]) -> None:
        """Take the metadata that a replica has set: with a status they become the call's trailing metadata.

        Without a status they are kept in `initial`, to be sent before the first message.
        """
        pairs = tuple(metadata)
        ended = any(name == STATUS_DETAILS for name, _ in pairs)
        self.initial = () if ended else tuple(pair for pair in pairs if pair[0] != SERVE_REQUEST_ID)
        self._context.set_trailing_metadata(tuple(pair for pair in pairs if pair not in self.initial))


async def _end(context: Any) -> None:
    """End the call with Sharp's status if its status is Serve's own (such as no replica), else do nothing.

    So clients learn when to come back.
    """
    error = _error(context)
    if error is not None:
        await abort(context, error)


def _error(context: Any) -> SharpError | None:
    """Return the error that a status of Serve's own means; None for a replica's status, and if Serve's is clear."""
    if any(name == STATUS_DETAILS for name, _ in context.trailing_metadata() or ()):
        return None
    code, details = context.code(), context.details()
    # A replica's own INTERNAL has details, so this call never came to one. `sharp.ray.router` ends a call whose replica
    # is dead with CANCELLED; a client that cancels its own call never comes here.
    if code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED):
        return UnavailableError("the replica that had the request was lost; send it again", RETRY_SECONDS)
    if code == grpc.StatusCode.UNAVAILABLE:
        return UnavailableError(f"no replica can take the request: {details}", RETRY_SECONDS)
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
        return QueueFullError("too many requests wait for a replica", RETRY_SECONDS)
    return None
