"""Errors that only serving raises, together with the common errors of `sharp.core.errors`."""

from sharp.core.errors import InputError, NotFoundError, SharpError

__all__ = [
    "SERVER_FAILED",
    "AlreadyExistsError",
    "ContextLengthError",
    "DeviceLostError",
    "DrainingError",
    "EngineEndedError",
    "EngineError",
    "FieldError",
    "InputError",
    "NotFoundError",
    "QueueFullError",
    "SharpError",
    "SlowReaderError",
    "StalledError",
    "TimeLimitError",
    "UnauthenticatedError",
    "UnavailableError",
]


SERVER_FAILED = "the server failed; its log says why"  # message for an exception that is not a SharpError


class FieldError(InputError):
    """A field of a request cannot be used. `field` is its name in `GenerateRequest`, `SamplingParams` or the body."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class ContextLengthError(FieldError):
    """A prompt has more tokens than the context has room for.

    `limit` is the length of the context, `tokens` the length of the prompt (None if not counted), and `needed` the room
    that the completion needs.
    """

    def __init__(self, field: str, message: str, limit: int, tokens: int | None, needed: int) -> None:
        super().__init__(field, message)
        self.limit, self.tokens, self.needed = limit, tokens, needed


class AlreadyExistsError(SharpError):
    """A running request has the same request id."""


class DrainingError(SharpError):
    """The server is shutting down and accepts no more requests."""


class EngineError(SharpError):
    """A step of the engine failed. The requests of that step fail, but the engine continues."""


class DeviceLostError(EngineError):
    """The GPU fails every further call of this process, for example after an illegal access; restart the process."""


class EngineEndedError(EngineError):
    """The engine has ended, because of a defect or a lost device. The server cannot continue without it."""


class QueueFullError(SharpError):
    """Too many requests or tokens wait. Retry after `retry_after` seconds, estimated from the current rate."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class UnauthenticatedError(SharpError):
    """The request has no token, or a token that the server does not know."""


class StalledError(SharpError):
    """A step of the engine takes much longer than usual. A new request would wait for the step to end."""


class TimeLimitError(SharpError):
    """The request took longer than the client allowed."""


class UnavailableError(SharpError):
    """The service that was asked is gone or not ready. Retry after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class SlowReaderError(SharpError):
    """The request was stopped, because the client does not read its stream."""
