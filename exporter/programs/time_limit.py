"""A limit on time, because a program from a file may compute anything, even for days."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from sharp.core.cli import Refusal, echo_error
from sharp.core.errors import InputError

SECONDS = 1800.0
SECONDS_OF_BYTE = 3600 / 2**30
AGAIN = 5.0  # seconds between signals; an error raised in a destructor or a C++ callback is lost
GRACE = 60.0  # seconds that a running operator is given to return


class _OutOfTime(BaseException):
    """The end of the time limit; no Exception, because code that runs in between may catch every Exception."""


@contextmanager
def time_of_program(path: Path) -> Iterator[None]:
    """Limit the time of all computation on the program in the file `path`: 30 minutes, and an hour for each GiB.

    Files without the suffix .pt2, and threads other than the main thread, have no limit. Python cannot interrupt an
    operator. If an operator does not return in another minute, the process prints the message and exits with code 2.
    The context uses SIGALRM and the real-time timer, and restores both at its end.

    Raises:
        InputError: the computation took too long.
    """
    if path.suffix != ".pt2" or not path.is_file() or threading.current_thread() is not threading.main_thread():
        yield  # only the main thread gets signals
        return
    seconds = SECONDS + SECONDS_OF_BYTE * path.stat().st_size
    sentence = (
        f"{path} takes more than {seconds / 60:.0f} minutes, the limit for a file of its size; if you trust it, load "
        "it with torch.export.load and call sharp.export, which has no limit"
    )

    def stop(_number: int, _frame: object) -> None:
        """Raise _OutOfTime; the handler of the timer's signal."""
        raise _OutOfTime

    print_lost = sys.unraisablehook

    def print_others(lost: "sys.UnraisableHookArgs") -> None:
        """Print exceptions that Python cannot raise, except _OutOfTime."""
        if lost.exc_type is not _OutOfTime:
            print_lost(lost)

    sys.unraisablehook = print_others
    before, began = signal.signal(signal.SIGALRM, stop), time.monotonic()
    other, _ = signal.setitimer(
        signal.ITIMER_REAL, seconds, AGAIN
    )  # `other` is the rest of a timer that ran already, or 0
    last = threading.Timer(seconds + GRACE, _end, [sentence])
    last.daemon = True
    last.start()
    try:
        yield
    except _OutOfTime:
        raise InputError(sentence) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        sys.unraisablehook = print_lost
        if other:
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, other - (time.monotonic() - began)))
        last.cancel()


def _end(sentence: str) -> None:
    """Print the sentence as an error and end the process at once with the exit code of a refusal."""
    Console(stderr=True).show_cursor()  # a progress bar hides the cursor
    echo_error(sentence)
    os._exit(Refusal.exit_code)
