"""`GuideTrial`: compiles a grammar in another process first, where time and memory are limited.

Compiling a schema, an expression or a grammar cannot be interrupted, and a text of 1 kB can take minutes and gigabytes.
A grammar that passes the trial is compiled again in the server, at a cost that is then known to be small.
"""

import json
import threading
from dataclasses import dataclass
from pathlib import Path

from sharp.serving.api.errors import EngineError, QueueFullError, UnavailableError
from sharp.serving.worker_process import RETRY_SECONDS, WorkerLostError, WorkerProcess

SECONDS = 1.0  # CPU time; common schemas take some hundredths of a second
WALL_SECONDS = 5.0  # elapsed time, on a busy machine
MEMORY_BYTES = 128 * 2**20
MOST_WAITING = 16  # trials run one after the other
START_SECONDS = 60.0
PROGRAM = Path(__file__).with_name("guide_worker.py")


@dataclass(frozen=True)
class Outcome:
    """The outcome of a trial.

    Attributes:
        error: the reason why the grammar does not compile within the limits; empty if it does.
        size: the memory, in bytes, that the compiled grammar takes.
    """

    error: str
    size: int


class GuideTrial:
    """The trial process, started at the first trial and restarted after it is lost. Thread-safe."""

    def __init__(self, tokenizer: str, vocab_size: int, ends: list[int]) -> None:
        self._vocabulary = {"tokenizer": tokenizer, "vocab_size": vocab_size, "ends": ends}
        self._process: WorkerProcess | None = None
        self._lock = threading.Lock()
        self._ended = False
        self._waiting = threading.BoundedSemaphore(MOST_WAITING)

    def run(self, kind: str, text: str) -> Outcome:
        """Compile a grammar under the limits, after waiting for earlier trials.

        `kind` says what `text` is: "json" (a schema), "regex" or "grammar".

        Raises:
            QueueFullError: `MOST_WAITING` other trials wait or run, or the machine is too busy.
            EngineError: the process does not start.
            UnavailableError: `end` was called, no process can be made, or the process was killed twice, perhaps by the
                kernel for lack of memory.
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
        """Compile a guide of a kind ("json", "regex", ...) in the worker process and return the outcome."""
        limits = {"seconds": SECONDS, "wall_seconds": WALL_SECONDS, "memory": MEMORY_BYTES}
        message = json.dumps({"kind": kind, "text": text, **limits}).encode()
        # The trial is repeated once if the worker was killed: it forks for each grammar, so its death is not the
        # grammar's fault.
        for _ in range(2):
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
        """Return the worker process, started with the vocabulary if it does not run.

        Raises:
            EngineError: the process does not start.
        """
        if self._process is not None and self._process.runs:
            return self._process
        if self._process is not None:
            self._process.close()
        self._process = WorkerProcess(PROGRAM)
        try:
            self._process.exchange(json.dumps(self._vocabulary).encode(), START_SECONDS)
        except (TimeoutError, WorkerLostError) as error:
            if isinstance(error, WorkerLostError) and error.code < 0:  # a signal killed the process
                raise
            text = "the process that compiles schemas and grammars did not start; the log says why"
            raise EngineError(text) from error
        return self._process

    def end(self) -> None:
        """End the process for good. Callers that wait for a trial get an error."""
        self._ended = True
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            self.close()

    def close(self) -> None:
        """End the idle process. A later trial starts a new one."""
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def __del__(self) -> None:
        self.close()
