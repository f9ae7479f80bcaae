"""Our errors as gRPC status codes."""

import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc

from sharp.serving.errors import AlreadyExistsError, InputError, NotFoundError, SharpError, SlowReaderError

logger = logging.getLogger(__name__)

CODES: tuple[tuple[type[SharpError], grpc.StatusCode], ...] = (
    (InputError, grpc.StatusCode.INVALID_ARGUMENT),
    (NotFoundError, grpc.StatusCode.NOT_FOUND),
    (AlreadyExistsError, grpc.StatusCode.ALREADY_EXISTS),
    (SlowReaderError, grpc.StatusCode.RESOURCE_EXHAUSTED),
)

Service = TypeVar("Service")
Message = TypeVar("Message")
Reply = TypeVar("Reply")
Context = grpc.aio.ServicerContext[Any, Any]


def code_of(error: SharpError) -> grpc.StatusCode:
    """The status code of an error; INTERNAL when it is not the client's."""
    return next((code for kind, code in CODES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


def reports_errors(
    method: Callable[[Service, Message, Context], Awaitable[Reply]],
) -> Callable[[Service, Message, Context], Awaitable[Reply]]:
    """Make a servicer's method end with the status of the error that it raises."""

    @functools.wraps(method)
    async def wrapper(self: Service, request: Message, context: Context) -> Reply:
        try:
            return await method(self, request, context)
        except SharpError as error:
            return await context.abort(code_of(error), str(error))
        except grpc.aio.BaseError:  # the status is already set
            raise
        except Exception:
            logger.exception("%s failed", method.__qualname__)
            return await context.abort(grpc.StatusCode.INTERNAL, "the server failed; its log says why")

    return wrapper
