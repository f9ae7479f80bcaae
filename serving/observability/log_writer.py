"""`LogWriter`: writes the log in its own thread, so that a slow disk or reader delays no request."""

import logging
import os
import threading
from collections import deque
from contextlib import suppress
from typing import TextIO

MOST_CHARACTERS = 2**22  # maximum number of waiting characters; further lines are dropped and counted
FLUSH_SECONDS = 1.0


class LogWriter(logging.Handler):
    """A handler that writes log records to `stream`. Lines that cannot be written, as to a full disk, are lost.

    `logging.handlers.QueueListener` is not used, because it limits the number of records but not their size, and its
    end waits for the writer.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        try:
            self._descriptor: int | None = stream.fileno()
        except (OSError, ValueError):  # a stream in memory
            self._descriptor = None
        self._lines: deque[str] = deque()
        self._characters = 0  # characters of waiting lines and of the line that is being written
        self._lost = 0
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the line of a record for writing, or count it as lost if too much waits."""
        try:
            line = self.format(record) + "\n"
        # The arguments do not fit the message. `handleError` reports this as logging usually does.
        except Exception:
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
        """Wait until all lines are written, for a second at most."""
        with self._changed:
            self._changed.wait_for(lambda: not self._characters, FLUSH_SECONDS)

    def close(self) -> None:
        """Close the handler, which drops later records. The thread ends after it has written all lines."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        super().close()

    def _run(self) -> None:
        """Write queued lines until the writer is closed; the function of its thread."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines or self._closed)
                if not self._lines:
                    return
                line = self._lines.popleft()
            with suppress(OSError, ValueError):  # the disk is full, or the stream is closed
                self._write(line)
            with self._changed:
                self._characters -= len(line)
                self._changed.notify_all()

    def _write(self, line: str) -> None:
        """Write one line to the descriptor, or to the stream if that has none."""
        if self._descriptor is None:
            self._stream.write(line)
            self._stream.flush()
            return
        rest = line.encode(errors="backslashreplace")
        # Write to the descriptor, not to the stream. At exit, Python would wait for the lock of a stream that is being
        # written.
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]
