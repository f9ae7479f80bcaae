"""Watch the event loops of test servers: no callback may compute for long, and none may wait for a file.

The watch counts processor time of the loop's own thread without garbage collections, so a busy machine changes nothing.
A callback that waits takes no processor time. Calls that may wait are therefore found by Python's audit events.
"""

import asyncio
import gc
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MOST_SECONDS = 0.05
# Audit events of calls that may wait for a disk, a network file system, a resolver or a process. `time.sleep` has an
# event from Python 3.13 on. `os.stat` and reads have none.
WAITING = ("open", "os.listdir", "os.scandir", "time.sleep", "subprocess.Popen", "os.system", "socket.getaddrinfo")
ROOT = Path(__file__).parents[2]


class LoopWatch:
    """A record of the callbacks of watched loops that blocked their loop."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._loops: set[int] = set()
        self._inside = threading.local()

    @contextmanager
    def installed(self) -> Iterator["LoopWatch"]:
        """Watch callbacks inside the block. The audit hook stays, because Python cannot remove it."""
        run, watch = asyncio.Handle._run, self

        def watched(handle: asyncio.Handle) -> None:
            if id(handle._loop) not in watch._loops:
                return run(handle)
            inside = watch._inside
            inside.callback, inside.collecting = handle, 0.0
            began = time.thread_time()
            try:
                run(handle)
            finally:
                took = time.thread_time() - began - inside.collecting
                inside.callback = None
                if took > MOST_SECONDS:
                    watch.found.append(f"the event loop stood for {took * 1000:.0f} ms in {handle!r}")

        asyncio.Handle._run = watched
        gc.callbacks.append(self._collected)
        sys.addaudithook(self._audit)
        try:
            yield self
        finally:
            asyncio.Handle._run = run
            gc.callbacks.remove(self._collected)
            self._loops.clear()

    def add(self, loop: asyncio.AbstractEventLoop) -> None:
        """Watch a loop from now on."""
        self._loops.add(id(loop))

    def remove(self, loop: asyncio.AbstractEventLoop) -> None:
        """Stop watching a loop, because its server begins to end."""
        self._loops.discard(id(loop))

    def _collected(self, phase: str, _info: dict[str, int]) -> None:
        inside = self._inside
        if getattr(inside, "callback", None) is not None:
            inside.collecting += time.thread_time() if phase == "stop" else -time.thread_time()

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in WAITING or getattr(self._inside, "callback", None) is None:
            return
        if not str(arguments[0]).endswith(".py"):  # a traceback reads the source of its functions
            self.found.append(f"{event} {arguments[:1]} in the event loop, from {' < '.join(_callers())}")


def _callers() -> Iterator[str]:
    """Yield the lines of this repository's functions on the stack, the innermost first."""
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and ".venv" not in path.parts:
            yield f"{path.relative_to(ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
