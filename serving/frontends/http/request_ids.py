"""`x-request-id`: a request's name on its way through proxies and logs."""

import re

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sharp.serving.api.request import new_request_id

HEADER = "x-request-id"
STATE = "sharp.request_id"  # in the scope: the id, and whether it is the client's
VALID = re.compile(r"[!-~]{1,128}")


class RequestIdMiddleware:
    """ASGI middleware that gives every response the id that its request came with, or a random id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, and add the header `x-request-id` to its response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Request(scope).headers.get(HEADER, "")
        valid = VALID.fullmatch(given) is not None
        request_id = given if valid else new_request_id()
        scope[STATE] = (request_id, valid)

        async def with_id(message: Message) -> None:
            """Send a message, with the request's id among the headers of the response."""
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        await self._app(scope, receive, with_id)


def request_id_of(scope: Scope, own: str = "") -> tuple[str, str]:
    """Return the id of a request for its client (`own` if the body has one) and the id for the engine, which is unique.

    An id that the client chose gets a random end for the engine.
    """
    request_id, given = scope.get(STATE) or (new_request_id(), False)
    if own:
        request_id, given = own, True
    return request_id, f"{request_id}-{new_request_id()[:8]}" if given else request_id
