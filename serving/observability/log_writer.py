"""`LogWriter`: the log is written by a thread of its own, so that a slow disk or reader holds nobody up."""

import logging
import os
import threading
from collections import deque
from contextlib import suppress
from typing import TextIO

MOST_CHARACTERS = 2**22  # that wait to be written; what is logged then is left out, and counted
FLUSH_SECONDS = 1.0


class LogWriter(logging.Handler):
    """Writes to `stream`. What cannot be written, as on a full disk, is lost.

    `logging.handlers.QueueListener` bounds the number of records and not their size, and its end waits for the writer.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        try:
            self._descriptor: int | None = stream.fileno()
        except (OSError, ValueError):  # a stream in memory
            self._descriptor = None
        self._lines: deque[str] = deque()
        self._characters = 0  # of lines, and of what is being written
        self._lost = 0
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        try:
            line = self.format(record) + "\n"
        except Exception:  # arguments that do not fit their message; logging says so
            self.handleError(record)
            return
        with self._changed:
            if self._closed:
                return
            if self._characters + len(line) > MOST_CHARACTERS:
                self._lost += 1
                return
            if self._lost:
                line = f"{self._lost} lines of the log are missing here: they could not be written in time\n{line}"
                self._lost = 0
            self._lines.append(line)
            self._characters += len(line)
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all is written, for a second at most."""
        with self._changed:
            self._changed.wait_for(lambda: not self._characters, FLUSH_SECONDS)

    def close(self) -> None:
        """End the thread once all is written; see `logging.Handler`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        super().close()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines or self._closed)
                if not self._lines:
                    return
                line = self._lines.popleft()
            with suppress(OSError, ValueError):  # a full disk; a stream that was closed
                self._write(line)
            with self._changed:
                self._characters -= len(line)
                self._changed.notify_all()

    def _write(self, line: str) -> None:
        if self._descriptor is None:
            self._stream.write(line)
            self._stream.flush()
            return
        rest = line.encode(errors="backslashreplace")
        while rest:  # not through the stream: at its end, Python would wait for the lock of one that is being written
            rest = rest[os.write(self._descriptor, rest) :]
