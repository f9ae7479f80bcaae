"""The cases of a section in order. A case that fails becomes a row with the error, and the others still run."""

import faulthandler
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]
# A case that takes longer hangs, and its process is ended, because a kernel without end stops only with its process.
# The compiler takes up to 190 s for a kernel, and the case that launches a kernel compiles it if need be.
CASE_SECONDS = 240
PREPARE_SECONDS = 420


class DeviceLostError(Exception):
    """The GPU takes no more work from this process, as after a read of a wrong address."""


class Cases:
    """The cases that were begun, counted so that another process can go on behind a case that ended this process."""

    def __init__(
        self,
        timely: Callable[[], bool],
        done: int = 0,
        on_begin: Callable[[int], Any] = int,
        on_end: Callable[[int], Any] = int,
    ) -> None:
        """Leave out the first `done` cases, and all that would begin when `timely` returns False.

        `on_begin` and `on_end` are called with the numbers (from 1) of the others.
        """
        self.timely = timely
        self.done = done
        self.begun = 0
        self.complete = True  # no case was left out for want of time
        self._on_begin = on_begin
        self._on_end = on_end

    def run(
        self, named: Row, work: Callable[[], Iterable[Row]], prepare: Callable[[], object] = lambda: None
    ) -> Iterator[Row]:
        """Yield the rows of a case with `named` in front, or a row with its error; `prepare` waits for its compilers.

        A case that is left out yields nothing. If `prepare` takes more than 420 s, or `work` more than 240 s, the
        process is ended.

        Raises:
            DeviceLostError: nothing can run in this process any more.
        """
        if not self.timely():
            self.complete = False
            return
        self.begun += 1
        if self.begun <= self.done:
            return
        self._on_begin(self.begun)
        faulthandler.dump_traceback_later(PREPARE_SECONDS, exit=True)
        failed = None
        try:
            prepare()
            faulthandler.dump_traceback_later(CASE_SECONDS, exit=True)
            for row in work():
                yield {**named, **row}
        except Exception as error:  # of any kind: only the results file is left of a lent machine
            failed = failure(error)
        finally:
            faulthandler.cancel_dump_traceback_later()
        if failed:
            yield {**named, **failed}
        self._on_end(self.begun)
        check_device()


def failure(error: Exception) -> Row:
    """Return what is kept of an error, to find its cause without the machine: error (text) and where (last frames)."""
    frames = traceback.extract_tb(error.__traceback__)[-8:]
    where = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames]
    return {"error": f"{type(error).__name__}: {error}"[:3000], "where": where}


def check_device() -> None:
    """Wait for the GPU, which tells of errors late, and free torch's unused memory; without a GPU do nothing.

    Raises:
        DeviceLostError: every call returns an error.
    """
    if not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError as error:
        raise DeviceLostError(str(error).splitlines()[0]) from error
