"""Bearer tokens on the HTTP port."""

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from sharp.serving.api.errors import UnauthenticatedError
from sharp.serving.frontends.http.errors import error_response, path_of
from sharp.serving.frontends.http.origin import origin_of
from sharp.serving.observability.request_log import refusals_logged
from sharp.serving.security.caller import CURRENT_TOKEN
from sharp.serving.security.open_access import HTTP_OPEN_PATHS
from sharp.serving.security.tokens import Tokens


def is_protected(scope: Scope) -> bool:
    """Whether a request needs a token, judged by its path without a prefix that Ray Serve puts before it."""
    return scope["type"] == "http" and path_of(scope) not in HTTP_OPEN_PATHS


class TokenMiddleware:
    """ASGI middleware that refuses requests without a valid token with 401, before their body is read."""

    def __init__(self, app: ASGIApp, tokens: Tokens) -> None:
        self._app = app
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request if it has a valid token or needs none; otherwise respond with 401."""
        if is_protected(scope):
            try:
                with refusals_logged(origin_of(scope), None):
                    headers = Request(scope).headers
                    key = headers.get("x-api-key")  # the header of Anthropic's clients
                    given = headers.get("authorization") or (None if key is None else f"Bearer {key}")
                    CURRENT_TOKEN.set(self._tokens.check(given))
            except UnauthenticatedError as error:
                await error_response(error, scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)
