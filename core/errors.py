"""The exceptions of Sharp, one small tree. Each message says what is wrong and what to do."""


class SharpError(Exception):
    """Any failure that Sharp reports on purpose; command lines print its message and exit with code 2."""


class InputError(SharpError, ValueError):
    """A value that the user gave cannot be used; the message names the field, the value and the limit."""


class NotFoundError(SharpError):
    """A file, model or request that the user named does not exist."""


class VerificationError(SharpError):
    """An exported model does not agree with its source model; command lines exit with code 1."""


def is_panic(error: BaseException) -> bool:
    """Whether an error is a panic of a library in Rust, whose class is no subclass of `Exception`."""
    return type(error).__module__ == "pyo3_runtime"
