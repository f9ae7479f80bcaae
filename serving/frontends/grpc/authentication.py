"""Bearer tokens on the gRPC port."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from sharp.serving.api.errors import UnauthenticatedError
from sharp.serving.frontends.grpc.status import abort
from sharp.serving.observability.request_log import refusals_logged
from sharp.serving.observability.request_record import RequestOrigin
from sharp.serving.security.tokens import Tokens

# Probes have no token.
OPEN_METHODS = (
    "/grpc.health.v1.Health/",
    "/inference.GRPCInferenceService/ServerLive",
    "/inference.GRPCInferenceService/ServerReady",
)


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Ends calls without a good token with UNAUTHENTICATED, before a message is read; health is open."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: Any,
    ) -> Any:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(OPEN_METHODS):
            return handler
        given = dict(handler_call_details.invocation_metadata or ()).get("authorization")
        try:
            with refusals_logged(RequestOrigin("grpc"), None):
                self._tokens.check(given if isinstance(given, str) else None)
        except UnauthenticatedError as error:
            return _refusal(handler, error)
        return handler


def _refusal(handler: Any, error: UnauthenticatedError) -> Any:
    """A handler of the same kind that does nothing but end the call."""

    async def refuse(_request: Any, context: Any) -> Any:
        return await abort(context, error)

    async def refuse_stream(_request: Any, context: Any) -> AsyncIterator[Any]:
        yield await abort(context, error)

    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming, handler.response_streaming]
    behaviour: Any = refuse_stream if handler.response_streaming else refuse
    return make(behaviour, handler.request_deserializer, handler.response_serializer)
