"""What Serve's gRPC proxies do with our calls: `grpc_servicer_functions: ["sharp.ray.proxy:add_services"]`.

Serve replaces the behaviour of every method by its own, which sends the call to a replica. Here two things are put
around that: a call is given its model and the beginning of its prompt to be routed by, and a status of Serve's own
becomes one that clients can act on. Serve says INTERNAL when a replica is lost; ours is UNAVAILABLE with RetryInfo.
"""

import hashlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from sharp.ray.handover import Give, handed_over
from sharp.serving.errors import QueueFullError, SharpError, UnavailableError
from sharp.serving.grpc.status import abort
from sharp.v1 import control_pb2, inference_pb2

SERVICES = (
    inference_pb2.DESCRIPTOR.services_by_name["InferenceService"],
    control_pb2.DESCRIPTOR.services_by_name["ControlService"],
)
# The beginning of a prompt by which it is routed. Longer ones share more of a cache, and are shared less often.
PREFIX_TOKENS = 64
PREFIX_CHARACTERS = 256
RETRY_SECONDS = 1.0
STATUS_DETAILS = "grpc-status-details-bin"


def add_services(_servicer: Any, server: grpc.aio.Server) -> None:
    """Add the services of `sharp.v1` to a proxy of Ray Serve."""
    for service in SERVICES:
        server.add_generic_rpc_handlers((_Handlers(service),))


class _Handlers(grpc.GenericRpcHandler):
    """The methods of a service, which Serve gives their behaviour."""

    def __init__(self, service: ServiceDescriptor) -> None:
        # Serve replaces this dictionary, by the name that grpc's own handler has it under.
        self._method_handlers: dict[str, Any] = {}
        for method in service.methods:
            kind = (
                grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
            )
            read = GetMessageClass(method.input_type).FromString
            self._method_handlers[f"/{service.full_name}/{method.name}"] = kind(_no_behaviour, read)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """See grpc.GenericRpcHandler."""
        handler = self._method_handlers.get(handler_call_details.method)
        if handler is None:
            return None

        async def unary(request: Any, context: Any) -> bytes:
            answer: bytes = await handler.unary_unary(request, _Routed(context, request))
            await _end(context)
            return answer

        async def stream(request: Any, context: Any) -> AsyncGenerator[bytes]:
            async def fill(give: Give) -> None:
                async for message in handler.unary_stream(request, _Routed(context, request)):
                    if message:  # an empty one only carries the status, and nothing must be sent before that
                        give(message)

            # Serve cancels a replica's call only when it is cancelled while it waits for the next message.
            async with aclosing(handed_over(fill)) as messages:
                async for message in messages:
                    yield message
            await _end(context)

        return handler._replace(unary_unary=unary, unary_stream=stream)


def _no_behaviour(_request: Any, _context: Any) -> Any:
    """Stand where Serve puts its own behaviour; nobody calls it."""
    raise NotImplementedError


class _Routed:
    """The context of a call with the metadata by which Serve routes, unless the client sent them."""

    def __init__(self, context: Any, request: Any) -> None:
        self._context = context
        given = {str(name): value for name, value in context.invocation_metadata() or ()}
        routing = {"multiplexed_model_id": getattr(request, "model", ""), "session_id": prefix_key(request)}
        self._metadata = [*({name: value for name, value in routing.items() if value} | given).items()]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def invocation_metadata(self) -> Sequence[tuple[str, Any]]:
        """See grpc.ServicerContext."""
        return self._metadata


def prefix_key(request: Any) -> str:
    """A name for the beginning of a request's prompt, equal for equal ones; empty where there is no prompt."""
    if not isinstance(request, inference_pb2.GenerateRequest):
        return ""
    beginning: Any = request.text[:PREFIX_CHARACTERS]
    if request.HasField("token_ids"):
        beginning = request.token_ids.ids[:PREFIX_TOKENS]
    known = repr((request.model, request.cache_salt, beginning))
    return hashlib.blake2b(known.encode(errors="replace"), digest_size=8).hexdigest()


async def _end(context: Any) -> None:
    """Let a status that is not a replica's end the call as one of ours, with what a client needs to come back."""
    if any(name == STATUS_DETAILS for name, _ in context.trailing_metadata() or ()):
        return
    error = _error(context.code(), context.details())
    if error is not None:
        await abort(context, error)


def _error(code: grpc.StatusCode | int, details: str) -> SharpError | None:
    """What a status of Serve's own says in our words; None where it says enough."""
    if code == grpc.StatusCode.INTERNAL:  # replicas say so with details: this one never came to it
        return UnavailableError("the replica that had the request was lost; send it again", RETRY_SECONDS)
    if code == grpc.StatusCode.UNAVAILABLE:
        return UnavailableError(f"no replica can take the request: {details}", RETRY_SECONDS)
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
        return QueueFullError("too many requests wait for a replica", RETRY_SECONDS)
    return None
