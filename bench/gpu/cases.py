"""The cases of a section in order: one that fails becomes a row with the error, and the others still run."""

import faulthandler
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]
# A case that takes longer hangs; a kernel without end stops with its process only. One kernel takes the compiler up to
# 190 s, and what was not compiled ahead is compiled by the case that launches it.
CASE_SECONDS = 240
PREPARE_SECONDS = 420


class DeviceLostError(Exception):
    """The GPU takes no more work from this process, as after a read of a wrong address."""


class Cases:
    """Counts the cases, so that another process can go on behind one that ended this process."""

    def __init__(
        self,
        timely: Callable[[], bool],
        done: int = 0,
        on_begin: Callable[[int], Any] = int,
        on_end: Callable[[int], Any] = int,
    ) -> None:
        """Leave out the first `done` cases; `on_begin` and `on_end` hear the numbers of the others."""
        self.timely = timely
        self.done = done
        self.begun = 0
        self.complete = True  # no case was left out for want of time
        self._on_begin = on_begin
        self._on_end = on_end

    def run(
        self, named: Row, work: Callable[[], Iterable[Row]], prepare: Callable[[], object] = lambda: None
    ) -> Iterator[Row]:
        """The rows of a case with `named` in front, or one with its error; `prepare` waits for its compilers.

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
        except Exception as error:  # whatever it is: the results file is all that is left of a lent machine
            failed = failure(error)
        finally:
            faulthandler.cancel_dump_traceback_later()
        if failed:
            yield {**named, **failed}
        self._on_end(self.begun)
        check_device()


def failure(error: Exception) -> Row:
    """What is kept of an error: enough to find it without the machine."""
    frames = traceback.extract_tb(error.__traceback__)[-8:]
    where = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames]
    return {"error": f"{type(error).__name__}: {error}"[:3000], "where": where}


def check_device() -> None:
    """Wait for the GPU, which tells of errors late.

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
