"""A GPU that is lost: after some errors of a kernel every later call in the process fails in the same way."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sharp.plugins.errors import SharpError
from sharp.serving.api.errors import DeviceLostError


@contextmanager
def lost_device(check: Callable[[], None]) -> Iterator[None]:
    """Look at the device where a step fails; `check` raises SharpError if nothing works there any more.

    CUDA repeats the error of a kernel that made an illegal access, and that of a GPU that fell off the bus, in every
    call that follows. Errors that concern one step only, as of memory that is not there, are not repeated.

    Raises:
        DeviceLostError: in place of the step's error, if the device is lost.
    """
    try:
        yield
    except Exception as error:
        try:
            check()
        except SharpError as words:
            raise DeviceLostError(f"the GPU is lost to this process: {words}. The step failed with: {error}") from error
        raise
