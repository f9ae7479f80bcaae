"""The metadata of gRPC calls, and Sharp's errors as gRPC status with the details of google.rpc."""

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
from sharp.serving.observability.refusals import note_reason
from sharp.serving.observability.request_record import RequestOrigin
from sharp.serving.security.caller import CURRENT_TOKEN, host_of_peer, share_of

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
# gRPC sends the message of an error twice in its metadata, percent-encoded and in Base64. It drops some metadata from
# 8 KiB on, and all from 16 KiB on.
MOST_MESSAGE_BYTES = 1024
MOST_FIELD_CHARACTERS = 64
RETRY_PUSHBACK = "grpc-retry-pushback-ms"  # gRPC A6
Service = TypeVar("Service")
Message = TypeVar("Message")
Reply = TypeVar("Reply")
Context = grpc.aio.ServicerContext[Any, Any]


def code_of(error: SharpError) -> grpc.StatusCode:
    """Return the status code of an error; INTERNAL for errors without an entry in `CODES`."""
    return next((code for kind, code in CODES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


def message_of(error: SharpError) -> str:
    """Return the text of an error, cut short, because gRPC makes RESOURCE_EXHAUSTED of long metadata."""
    message = str(error).encode(errors="replace")
    return message[:MOST_MESSAGE_BYTES].decode(errors="ignore") + (" ..." if len(message) > MOST_MESSAGE_BYTES else "")


def details_of(error: SharpError) -> Any | None:
    """Return the details that a client can act on: the field at fault, or the time to wait; None for other errors."""
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
    """Return the origin of a call with its metadata; metadata that is not text is left out."""
    metadata = context.invocation_metadata() or ()
    headers = {name: value for name, value in metadata if isinstance(value, str)}
    host, token = host_of_peer(context.peer()), CURRENT_TOKEN.get()
    return RequestOrigin(protocol, headers, host, token, share_of(token, host))


async def abort(context: Context, error: SharpError) -> Any:
    """End a call with the status of an error, and tell gRPC's own retries when to come back.

    Raises:
        grpc.aio.AbortError: always, unless the client reads nothing.
        asyncio.CancelledError: the client has read nothing for `UNREAD_SECONDS`.
    """
    if (current := note_reason(error)) is not None:
        current.refused(code_of(error).name)
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
        # Messages that the client does not read are before the status. gRPC sends the status after them, so nothing
        # here has to wait for that.
        raise asyncio.CancelledError from error


async def write(context: Context, message: Any) -> None:
    """Write a message of a stream.

    Raises:
        SlowReaderError: the client has read nothing for `UNREAD_SECONDS`. gRPC itself would wait without end.
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
    """Decorate a servicer's method so that an error which it raises becomes the status of the call.

    Any exception that is not a SharpError is logged, and becomes INTERNAL without its message.
    """

    @functools.wraps(method)
    async def wrapper(self: Service, request: Message, context: Context) -> Reply:
        """Call the method; an error ends the call with its gRPC status, an unexpected one is logged."""
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
