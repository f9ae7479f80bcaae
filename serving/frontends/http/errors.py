"""Sharp's errors as HTTP statuses with the body that OpenAI's clients read, or Triton's clients below /v2."""

import math
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Scope

from sharp.serving.api.errors import (
    AlreadyExistsError,
    ContextLengthError,
    DrainingError,
    FieldError,
    InputError,
    NotFoundError,
    QueueFullError,
    SharpError,
    SlowReaderError,
    StalledError,
    TimeLimitError,
    UnauthenticatedError,
    UnavailableError,
)
from sharp.serving.observability.refusals import note_reason


class TooLargeError(InputError):
    """The body of a request has too many bytes."""


class ForbiddenError(InputError):
    """A page of another site sends the request, or the request names a host that is not this server's."""


class UnsupportedMediaTypeError(InputError):
    """The content type of a request is that of a form, or its body is compressed in a way that is not supported."""


# The first entry that fits an error counts.
STATUSES: tuple[tuple[type[SharpError], int, str], ...] = (
    (TooLargeError, 413, "invalid_request_error"),
    (ForbiddenError, 403, "invalid_request_error"),
    (UnsupportedMediaTypeError, 415, "invalid_request_error"),
    (InputError, 400, "invalid_request_error"),
    (NotFoundError, 404, "invalid_request_error"),
    (AlreadyExistsError, 409, "invalid_request_error"),
    (QueueFullError, 429, "rate_limit_error"),
    (SlowReaderError, 429, "rate_limit_error"),
    (DrainingError, 503, "server_error"),
    (StalledError, 503, "server_error"),
    (TimeLimitError, 504, "server_error"),
    (UnavailableError, 503, "server_error"),
    (UnauthenticatedError, 401, "invalid_request_error"),
)


CODES = (
    (ContextLengthError, "context_length_exceeded"),
    (NotFoundError, "model_not_found"),
    (UnauthenticatedError, "invalid_api_key"),
    (QueueFullError, "rate_limit_exceeded"),
    (SlowReaderError, "rate_limit_exceeded"),
)


def error_body(error: SharpError) -> tuple[int, dict[str, Any]]:
    """Return the status and the body of an error; 500 for errors without an entry in `STATUSES`."""
    status, kind = next(
        ((status, kind) for of, status, kind in STATUSES if isinstance(error, of)), (500, "server_error")
    )
    code = next((code for kind, code in CODES if isinstance(error, kind)), None)
    param = error.field if isinstance(error, FieldError) else "model" if isinstance(error, NotFoundError) else None
    message = _context_sentence(error) if isinstance(error, ContextLengthError) else str(error)
    return status, {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _context_sentence(error: ContextLengthError) -> str:
    """Return OpenAI's own sentence, because clients look for it to shorten a conversation."""
    what = error.field
    context = f"This model's maximum context length is {error.limit} tokens."
    if error.tokens is None:
        requested = f"your {what} resulted in more than {error.limit} tokens. Please reduce the length of the {what}."
        return f"{context} However, {requested}"
    parts = f"({error.tokens} in the {what}, {error.needed} in the completion)"
    requested = f"you requested {error.tokens + error.needed} tokens {parts}"
    return f"{context} However, {requested}. Please reduce the length of the {what} or completion."


def error_response(error: SharpError, scope: Scope | None = None) -> JSONResponse:
    """Return the response of a request that failed before anything was sent; without a `scope` in OpenAI's form."""
    note_reason(error)
    status, body = error_body(error)
    if scope is not None and is_kserve(scope):
        body = {"error": str(error)}
    return JSONResponse(body, status, _headers(error))


def is_kserve(scope: Scope) -> bool:
    """Whether a request is of KServe's protocol, in which an error is a text; /v2/rerank is Cohere's."""
    path = path_of(scope)
    return path == "/v2" or (path.startswith("/v2/") and path != "/v2/rerank")


def path_of(scope: Scope) -> str:
    """Return the path of a request without the prefix of a model, as Starlette's routes read it behind Ray Serve."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


def _headers(error: SharpError) -> dict[str, str] | None:
    """Return the HTTP headers of an error: Retry-After (whole seconds) or WWW-Authenticate; None for other errors."""
    if isinstance(error, QueueFullError | UnavailableError):
        return {"Retry-After": str(math.ceil(error.retry_after))}
    return {"WWW-Authenticate": "Bearer"} if isinstance(error, UnauthenticatedError) else None
