"""The exceptions of Sharp: one small tree, each message says what is wrong and what to do."""


class SharpError(Exception):
    """Any failure that Sharp reports on purpose; command lines print it as one sentence and exit with code 2."""


class InputError(SharpError, ValueError):
    """A value that the user gave cannot be used; the message names the field, the value and the limit."""


class NotFoundError(SharpError):
    """A file, model or request that the user named does not exist."""


class VerificationError(SharpError):
    """An exported model does not agree with the model that it was made from; command lines exit with code 1."""


def is_panic(error: BaseException) -> bool:
    """Whether a library in Rust has met a defect of its own; its exception is no `Exception`."""
    return type(error).__module__ == "pyo3_runtime"
