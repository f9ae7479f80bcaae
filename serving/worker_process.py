"""`WorkerProcess`: a program in its own process that replies to lines of JSON in time, or is ended."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from sharp.serving.api.errors import UnavailableError

RETRY_SECONDS = 1.0
PART_BYTES = 2**16


class WorkerLostError(Exception):
    """The process has ended. `code` is its exit code, or minus the number of the signal that ended it."""

    def __init__(self, code: int) -> None:
        super().__init__(f"exit code {code}")
        self.code = code


class WorkerProcess:
    """A worker process. Only one thread at a time may call `exchange` and `close`; any thread may call `kill`."""

    def __init__(self, program: Path) -> None:
        """Start `program`.

        Raises:
            UnavailableError: no process can be started, because memory or descriptors are exhausted.
        """
        command = [sys.executable, "-P", str(program)]
        try:
            # The worker gets its own process group, so that it ends together with its forks.
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, process_group=0
            )
        except OSError as error:
            message = f"no process can be started: {error.strerror}; try again in {RETRY_SECONDS:g} s"
            raise UnavailableError(message, RETRY_SECONDS) from error
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        for pipe in (self._input, self._output):
            # Writing to a stopped process, which reads nothing, would block.
            os.set_blocking(pipe.fileno(), False)

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    @property
    def runs(self) -> bool:
        """Whether the process is running."""
        return self._process.poll() is None

    def exchange(self, message: bytes, seconds: float) -> dict[str, Any]:
        """Send a message of one or several lines of JSON, without the last line break, and return the reply, one line.

        After an error the process is closed.

        Raises:
            TimeoutError: there is no reply within `seconds`.
            WorkerLostError: the process has ended.
        """
        try:
            reply: dict[str, Any] = json.loads(self._exchange(message + b"\n", time.monotonic() + seconds))
        except TimeoutError:
            self.close()
            raise
        except (OSError, ValueError, EOFError) as error:  # the process has ended, perhaps in the middle of a line
            with contextlib.suppress(subprocess.TimeoutExpired):
                # The process ends by itself. Wait for its exit code, which tells the reason.
                self._process.wait(1)
            self.close()
            raise WorkerLostError(self._process.returncode) from error
        return reply

    def _exchange(self, message: bytes, deadline: float) -> bytes:
        """Send a message and return the process's reply, one line, until `deadline` (time.monotonic).

        Raises:
            TimeoutError: the deadline passed.
            EOFError: the process ended.
        """
        unsent, reply = memoryview(message), bytearray()
        poll = select.poll()  # select() takes no descriptor above 1023
        poll.register(self._input, select.POLLOUT)
        poll.register(self._output, select.POLLIN)
        while not reply.endswith(b"\n"):
            ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not ready:
                raise TimeoutError
            for descriptor, _ in ready:
                if descriptor == self._output.fileno():
                    part = os.read(descriptor, PART_BYTES)
                    if not part:
                        raise EOFError
                    reply += part
                else:
                    unsent = unsent[os.write(descriptor, unsent[:PART_BYTES]) :]
                    if not unsent:
                        poll.unregister(descriptor)
        return bytes(reply)

    def kill(self) -> None:
        """End the process and its forks. A caller that waits for a reply gets an error."""
        if self.runs:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the process, and close its pipes."""
        self.kill()
        self._process.wait()
        for pipe in (self._input, self._output):
            with contextlib.suppress(OSError):
                pipe.close()
