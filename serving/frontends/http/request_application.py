"""`RequestApplication`: the ASGI application of a route whose requests have a body."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sharp.serving.api.errors import SharpError
from sharp.serving.frontends.admission import Held
from sharp.serving.frontends.http.body import read_body
from sharp.serving.frontends.http.endpoint import Endpoint
from sharp.serving.frontends.http.errors import error_response
from sharp.serving.frontends.http.origin import origin_of
from sharp.serving.frontends.http.sending import until_disconnected
from sharp.serving.observability.request_log import refusals_logged
from sharp.serving.observability.request_record import RequestOrigin


class RequestApplication(ABC):
    """An ASGI application that reads the body of a request and responds to it.

    A request happens inside one call, so that whatever ends the call, also a client that goes, ends what the request
    runs.
    """

    protocol = "http"

    def __init__(self, endpoint: Endpoint, refusal: Callable[[SharpError, Scope], Response] = error_response) -> None:
        """Serve an endpoint; `refusal` makes the response of a request that fails before its own has begun."""
        self._endpoint = endpoint
        self._service = endpoint.service
        self._refusal = refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read one HTTP request and respond to it, as the ASGI interface prescribes."""
        origin, request = origin_of(scope, self.protocol), Request(scope, receive)
        try:
            with self._service.buffers.hold() as held:
                with refusals_logged(origin, self._endpoint.name):
                    await read_body(request, self._endpoint.max_body_bytes, held)
                await until_disconnected(receive, self._respond(request, held, origin, send))
        except ClientDisconnect:
            return
        except SharpError as error:
            await self._refusal(error, scope)(scope, receive, send)

    @abstractmethod
    async def _respond(self, request: Request, held: Held, origin: RequestOrigin, send: Send) -> None:
        """Respond to a request whose body is `held`.

        Raises:
            SharpError: the request fails before its response has begun.
        """
