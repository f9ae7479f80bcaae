"""The errors that only serving has."""

from sharp.plugins.errors import InputError, NotFoundError, SharpError

__all__ = ["AlreadyExistsError", "EngineError", "InputError", "NotFoundError", "SharpError", "SlowReaderError"]


class AlreadyExistsError(SharpError):
    """A running request already has the request id."""


class EngineError(SharpError):
    """A step of the engine failed; the requests of that step are lost, the engine goes on."""


class SlowReaderError(SharpError):
    """The client does not read its stream, so the request was stopped."""
