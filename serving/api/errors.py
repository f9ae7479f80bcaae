"""The errors that only serving has."""

from sharp.plugins.errors import InputError, NotFoundError, SharpError

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


SERVER_FAILED = "the server failed; its log says why"  # of an exception that is none of these


class FieldError(InputError):
    """A field of a request cannot be used; `field` is its name in `SamplingParams` or `Request`."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class ContextLengthError(FieldError):
    """A prompt has more tokens than the context has room for; `tokens` is None where they were not counted.

    `limit` is the length of the context, `needed` the room that the completion needs in it.
    """

    def __init__(self, field: str, message: str, limit: int, tokens: int | None, needed: int) -> None:
        super().__init__(field, message)
        self.limit, self.tokens, self.needed = limit, tokens, needed


class AlreadyExistsError(SharpError):
    """A running request already has the request id."""


class DrainingError(SharpError):
    """The server ends and takes no more requests."""


class EngineError(SharpError):
    """A step of the engine failed; the requests of that step are lost, the engine goes on."""


class DeviceLostError(EngineError):
    """The GPU fails every call of this process from now on, as after an illegal access: only a new process helps."""


class EngineEndedError(EngineError):
    """The engine has ended by a defect, or with its device; a server without one is of no use."""


class QueueFullError(SharpError):
    """Too many requests or tokens wait; try again after `retry_after` seconds, an estimate from the current rate."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class UnauthenticatedError(SharpError):
    """The request has no token, or one that the server does not know."""


class StalledError(SharpError):
    """A step of the engine takes much longer than steps do; what is asked now would wait with it."""


class TimeLimitError(SharpError):
    """The client gave the request less time than it took."""


class UnavailableError(SharpError):
    """Who was asked has gone, or there is nobody yet; ask again after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class SlowReaderError(SharpError):
    """The client does not read its stream, so the request was stopped."""
