"""A gRPC call: what it was sent with, and our errors as its status with the details of google.rpc."""

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from sharp.serving.api.errors import (
    SERVER_FAILED,
    AlreadyExistsError,
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
from sharp.serving.frontends.service import UNREAD_SECONDS
from sharp.serving.observability.request_record import RequestOrigin

logger = logging.getLogger(__name__)

CODES: tuple[tuple[type[SharpError], grpc.StatusCode], ...] = (
    (InputError, grpc.StatusCode.INVALID_ARGUMENT),
    (NotFoundError, grpc.StatusCode.NOT_FOUND),
    (AlreadyExistsError, grpc.StatusCode.ALREADY_EXISTS),
    (QueueFullError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (SlowReaderError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (DrainingError, grpc.StatusCode.UNAVAILABLE),
    (StalledError, grpc.StatusCode.UNAVAILABLE),
    (TimeLimitError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (UnavailableError, grpc.StatusCode.UNAVAILABLE),
    (UnauthenticatedError, grpc.StatusCode.UNAUTHENTICATED),
)
# They are in the metadata twice, percent-encoded and in Base64; from 8 KiB on gRPC drops some, and all from 16 KiB on.
MOST_MESSAGE_BYTES = 1024
MOST_FIELD_CHARACTERS = 64
RETRY_PUSHBACK = "grpc-retry-pushback-ms"  # gRPC A6
Service = TypeVar("Service")
Message = TypeVar("Message")
Reply = TypeVar("Reply")
Context = grpc.aio.ServicerContext[Any, Any]


def code_of(error: SharpError) -> grpc.StatusCode:
    """The status code of an error; INTERNAL when it is not the client's."""
    return next((code for kind, code in CODES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


def message_of(error: SharpError) -> str:
    """What an error says. It may repeat what a client sent, and of long metadata gRPC makes RESOURCE_EXHAUSTED."""
    message = str(error).encode(errors="replace")
    return message[:MOST_MESSAGE_BYTES].decode(errors="ignore") + (" ..." if len(message) > MOST_MESSAGE_BYTES else "")


def details_of(error: SharpError) -> Any | None:
    """What a client can act on: the field at fault, or when to come back."""
    if isinstance(error, FieldError):
        field = error.field[:MOST_FIELD_CHARACTERS]
        violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=message_of(error))
        return error_details_pb2.BadRequest(field_violations=[violation])
    if isinstance(error, QueueFullError | UnavailableError):
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(error.retry_after * 1000))
        return error_details_pb2.RetryInfo(retry_delay=delay)
    return None


def origin_of(context: Context, protocol: str) -> RequestOrigin:
    """How a call came; metadata that is not text is left out."""
    metadata = context.invocation_metadata() or ()
    return RequestOrigin(protocol, {name: value for name, value in metadata if isinstance(value, str)})


async def abort(context: Context, error: SharpError) -> Any:
    """End a call with the status of an error, and tell gRPC's own retries when to come back."""
    status = status_pb2.Status(code=code_of(error).value[0], message=message_of(error))
    if details := details_of(error):
        packed = any_pb2.Any()
        packed.Pack(details)
        status.details.append(packed)
    ended = rpc_status.to_status(status)
    trailing = ended.trailing_metadata
    if isinstance(error, QueueFullError | UnavailableError):
        trailing = (*trailing, (RETRY_PUSHBACK, str(round(error.retry_after * 1000))))
    try:
        async with asyncio.timeout(UNREAD_SECONDS):
            return await context.abort(ended.code, ended.details, trailing)
    except TimeoutError:
        # Messages that nobody reads are before it: gRPC will send it after them, and nothing here has to wait for that.
        raise asyncio.CancelledError from error


async def write(context: Context, message: Any) -> None:
    """Write a message of a stream.

    Raises:
        SlowReaderError: the client reads nothing of what gRPC holds for it; gRPC itself would wait without end.
    """
    try:
        async with asyncio.timeout(UNREAD_SECONDS):
            await context.write(message)
    except TimeoutError as error:
        message = f"the client read nothing for {UNREAD_SECONDS:g} s; the request was stopped"
        raise SlowReaderError(message) from error


def reports_errors(
    method: Callable[[Service, Message, Context], Awaitable[Reply]],
) -> Callable[[Service, Message, Context], Awaitable[Reply]]:
    """Make a servicer's method end with the status of the error that it raises."""

    @functools.wraps(method)
    async def wrapper(self: Service, request: Message, context: Context) -> Reply:
        try:
            return await method(self, request, context)
        except SharpError as error:
            return await abort(context, error)  # type: ignore[no-any-return]
        except grpc.aio.BaseError:  # the status is already set
            raise
        except Exception:
            logger.exception("%s failed", method.__qualname__)
            return await context.abort(grpc.StatusCode.INTERNAL, SERVER_FAILED)

    return wrapper
