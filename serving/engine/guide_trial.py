"""`GuideTrial`: a grammar is compiled in another process first, where its time and memory are limited.

Compiling a schema, an expression or a grammar cannot be interrupted, and a text of 1 kB can take minutes and gigabytes.
What passes the trial is compiled again in the server, at a cost that is then known to be small.
"""

import json
import threading
from dataclasses import dataclass
from pathlib import Path

from sharp.serving.api.errors import EngineError, QueueFullError, UnavailableError
from sharp.serving.worker_process import RETRY_SECONDS, WorkerLostError, WorkerProcess

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
        self._process: WorkerProcess | None = None
        self._lock = threading.Lock()
        self._ended = False
        self._waiting = threading.BoundedSemaphore(MOST_WAITING)

    def run(self, kind: str, text: str) -> Outcome:
        """Compile a grammar under the limits; waits for the trials before it.

        Raises:
            QueueFullError: `MOST_WAITING` others wait or run, or the machine is too busy.
            EngineError: the process cannot be started.
            UnavailableError: `end` was called, or the process was killed twice, say by the kernel for want of memory.
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
        limits = {"seconds": SECONDS, "wall_seconds": WALL_SECONDS, "memory": MEMORY_BYTES}
        message = json.dumps({"kind": kind, "text": text, **limits}).encode()
        for _ in range(2):  # the worker forks for a grammar: that it is killed itself is no fault of this one
            if self._ended:
                break
            try:
                reply = self._running().exchange(message, WALL_SECONDS + 1)
            except WorkerLostError:
                continue
            except TimeoutError:
                reply = {"busy": True}
            if not reply.get("busy"):
                return Outcome(reply["error"], reply["size"])
            text = f"the machine is too busy to compile it within {WALL_SECONDS:g} s"
            raise QueueFullError(f"{text}; try again in {RETRY_SECONDS:g} s", RETRY_SECONDS)
        if self._ended:
            raise UnavailableError("the server ends; ask another one", RETRY_SECONDS)
        text = "the process that compiles schemas and grammars was killed"
        raise UnavailableError(f"{text}; try again in {RETRY_SECONDS:g} s", RETRY_SECONDS)

    def _running(self) -> WorkerProcess:
        if self._process is not None and self._process.runs:
            return self._process
        if self._process is not None:
            self._process.close()
        self._process = WorkerProcess(PROGRAM)
        try:
            self._process.exchange(json.dumps(self._vocabulary).encode(), START_SECONDS)
        except (TimeoutError, WorkerLostError) as error:
            if isinstance(error, WorkerLostError) and error.code < 0:  # killed
                raise
            text = "the process that compiles schemas and grammars did not start; the log says why"
            raise EngineError(text) from error
        return self._process

    def end(self) -> None:
        """End the process for good; who waits for a trial gets an error."""
        self._ended = True
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            self.close()

    def close(self) -> None:
        """End the process, which does nothing now; a later trial starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def __del__(self) -> None:
        self.close()
