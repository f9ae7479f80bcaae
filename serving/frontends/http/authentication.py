"""Bearer tokens on the HTTP port."""

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from sharp.serving.api.errors import UnauthenticatedError
from sharp.serving.frontends.http.errors import error_response, path_of
from sharp.serving.observability.request_log import refusals_logged
from sharp.serving.observability.request_record import RequestOrigin
from sharp.serving.security.tokens import Tokens

# Not /health and /metrics, whose readers have no token, and / itself, which asks for one; of /v2 not health, either.
PROTECTED = (
    "/live",
    "/attention",
    "/v1/",
    "/v2/models",
    "/v2/repository",
    "/tokenize",
    "/detokenize",
    "/rerank",
    "/v2/rerank",
    "/score",
)


def is_protected(scope: Scope) -> bool:
    """Whether a request is for the model, also where that has a prefix of its own, as behind Ray Serve."""
    if scope["type"] != "http":
        return False
    return path_of(scope).startswith(PROTECTED)


class TokenMiddleware:
    """Refuses requests without a valid token with 401, before their body is read."""

    def __init__(self, app: ASGIApp, tokens: Tokens) -> None:
        self._app = app
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if is_protected(scope):
            try:
                with refusals_logged(RequestOrigin("http"), None):
                    headers = Request(scope).headers
                    key = headers.get("x-api-key")  # Anthropic's
                    self._tokens.check(headers.get("authorization") or (None if key is None else f"Bearer {key}"))
            except UnauthenticatedError as error:
                await error_response(error, scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)
