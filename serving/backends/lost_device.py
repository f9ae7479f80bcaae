"""Detection of a lost GPU: after some kernel errors, every later CUDA call of the process fails in the same way."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sharp.core.errors import SharpError
from sharp.serving.api.errors import DeviceLostError


@contextmanager
def lost_device(check: Callable[[], None]) -> Iterator[None]:
    """Check the device when a step fails. `check` raises SharpError if nothing works there any more.

    CUDA repeats some errors in every later call, such as an illegal access by a kernel or a GPU that fell off the bus.
    Errors that concern a single step, such as a lack of memory, are not repeated.

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
