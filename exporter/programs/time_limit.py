"""A program from a file may compute anything, and for days."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from sharp.plugins.cli import Refusal, echo_error
from sharp.plugins.errors import InputError

SECONDS = 1800.0
SECONDS_OF_BYTE = 3600 / 2**30
AGAIN = 5.0  # seconds; what is raised in a destructor or a callback of C++ is lost
GRACE = 60.0  # seconds, in which a single operator may end


class _OutOfTime(BaseException):
    """Not an Exception, which what runs in between may catch."""


@contextmanager
def time_of_program(path: Path) -> Iterator[None]:
    """Inside, all that is computed of the program in the file `path` ends; of another file nothing is limited.

    Nothing in Python interrupts an operator; where one does not return, the process ends, with the same sentence.

    Raises:
        InputError: it took too long.
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
        raise _OutOfTime

    print_lost = sys.unraisablehook

    def print_others(lost: "sys.UnraisableHookArgs") -> None:
        if lost.exc_type is not _OutOfTime:
            print_lost(lost)

    sys.unraisablehook = print_others
    before, began = signal.signal(signal.SIGALRM, stop), time.monotonic()
    other, _ = signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN)  # 0: none runs
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
    Console(stderr=True).show_cursor()  # which a bar of progress hides
    echo_error(sentence)
    os._exit(Refusal.exit_code)
