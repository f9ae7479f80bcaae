"""Bearer tokens on the gRPC port."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from sharp.serving.api.errors import UnauthenticatedError
from sharp.serving.frontends.grpc.status import abort, origin_of
from sharp.serving.observability.request_log import log_request
from sharp.serving.observability.request_record import RequestRecord
from sharp.serving.security.caller import CURRENT_TOKEN
from sharp.serving.security.open_access import GRPC_OPEN_METHODS
from sharp.serving.security.tokens import Tokens


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """An interceptor that ends calls without a valid token before a message is read, except those of health."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: Any,
    ) -> Any:
        """Return the handler of the call, or one that ends the call with UNAUTHENTICATED."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method in GRPC_OPEN_METHODS:
            return handler
        given = dict(handler_call_details.invocation_metadata or ()).get("authorization")
        try:
            CURRENT_TOKEN.set(self._tokens.check(given if isinstance(given, str) else None))
        except UnauthenticatedError as error:
            return _refusal(handler, error)
        return handler


def _refusal(handler: Any, error: UnauthenticatedError) -> Any:
    """Return a handler of the same kind as `handler` that only ends the call."""

    async def refuse(_request: Any, context: Any) -> Any:
        """Log the refused call and end it with UNAUTHENTICATED."""
        log_request(RequestRecord(origin_of(context, "grpc"), error=str(error)), None, None)
        return await abort(context, error)

    async def refuse_stream(request: Any, context: Any) -> AsyncIterator[Any]:
        """End a call with a stream of responses as `refuse` does."""
        yield await refuse(request, context)

    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming, handler.response_streaming]
    behaviour: Any = refuse_stream if handler.response_streaming else refuse
    return make(behaviour, handler.request_deserializer, handler.response_serializer)
