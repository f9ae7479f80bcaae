"""`GuideTrial`: a grammar is compiled in another process first, where its time and memory are limited.

Compiling a schema, an expression or a grammar cannot be interrupted, and a text of 1 kB can take minutes and gigabytes.
What passes the trial is compiled again in the server, at a cost that is then known to be small.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sharp.serving.api.errors import EngineError, QueueFullError, UnavailableError

SECONDS = 1.0  # of a processor; common schemas take some hundredths
WALL_SECONDS = 5.0  # on a machine that is busy
MEMORY_BYTES = 128 * 2**20
MOST_WAITING = 16  # trials run one after the other
START_SECONDS = 60.0
PROGRAM = Path(__file__).with_name("guide_worker.py")


@dataclass(frozen=True)
class Outcome:
    """`error` is empty if the grammar compiles within the limits; `size` is the memory that it then takes, in bytes."""

    error: str
    size: int


class GuideTrial:
    """The process, started at the first trial and again after it was lost. Safe to share between threads."""

    def __init__(self, tokenizer: str, vocab_size: int, ends: list[int]) -> None:
        self._vocabulary = {"tokenizer": tokenizer, "vocab_size": vocab_size, "ends": ends}
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._ended = False
        self._waiting = threading.BoundedSemaphore(MOST_WAITING)

    def run(self, kind: str, text: str) -> Outcome:
        """Compile a grammar under the limits; waits for the trials before it.

        Raises:
            QueueFullError: `MOST_WAITING` others wait or run.
            EngineError: the process cannot be started.
            UnavailableError: `end` was called.
        """
        if not self._waiting.acquire(blocking=False):
            message = f"{MOST_WAITING} schemas, expressions or grammars wait to be compiled already"
            raise QueueFullError(f"{message}; try again in {SECONDS:g} s", SECONDS)
        try:
            with self._lock:
                return self._run(kind, text)
        finally:
            self._waiting.release()

    def _run(self, kind: str, text: str) -> Outcome:
        self._check_ended()
        if self._process is None or self._process.poll() is not None:
            self._start()
        limits = {"seconds": SECONDS, "wall_seconds": WALL_SECONDS, "memory": MEMORY_BYTES}
        found = self._exchange({"kind": kind, "text": text, **limits}, WALL_SECONDS)
        if found is None:
            self._check_ended()
            return Outcome("it took too long to compile", 0)
        return Outcome(found["error"], found["size"])

    def _check_ended(self) -> None:
        if self._ended:
            raise UnavailableError("the server ends; ask another one", SECONDS)

    def _start(self) -> None:
        self.close()
        command = [sys.executable, "-P", str(PROGRAM)]
        # A group of its own: it ends together with the fork that runs just then.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)
        if self._exchange(self._vocabulary, START_SECONDS) is None:
            raise EngineError("the process that compiles schemas and grammars did not start; the log says why")

    def _exchange(self, message: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        """The reply to a message; None if there is none in time, and the process is gone."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(message).encode() + b"\n")
            process.stdin.flush()
            poll = select.poll()  # select() takes no descriptor above 1023
            poll.register(process.stdout, select.POLLIN)
            if poll.poll((seconds + 1) * 1000) and (line := process.stdout.readline()):
                reply: dict[str, Any] = json.loads(line)
                return reply
        except (OSError, ValueError):  # the process has ended, or was closed here
            pass
        self.close()
        return None

    def end(self) -> None:
        """End the process for good; who waits for a trial gets an error."""
        self._ended = True
        self.close()

    def close(self) -> None:
        """End the process and its fork."""
        process, self._process = self._process, None
        if process is not None:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()

    def __del__(self) -> None:
        self.close()
