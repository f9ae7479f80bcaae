"""`TemplateProcess`: chat templates run in another process, where their time, memory and output are limited."""

import json
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sharp.serving.api.errors import InputError, QueueFullError, UnavailableError
from sharp.serving.worker_process import RETRY_SECONDS, WorkerLostError, WorkerProcess

SECONDS = 2.0  # of a processor, for each rendering; usual ones take a millisecond
WALL_SECONDS = 8.0  # on a machine that is busy
MEMORY_BYTES = 160 * 2**20
MOST_CHARACTERS = 2**24  # of a rendered text
MOST_WAITING = 64  # renderings run one after the other
START_SECONDS = 60.0
PROGRAM = Path(__file__).with_name("template_worker.py")


class TemplateLimitError(InputError):
    """A template takes more than it may."""


class TemplateProcess:
    """The templates of a model, by name, in a process that is started again after it was lost. Thread-safe."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """Compile the templates.

        Raises:
            InputError: one is no template, or takes too long or too much memory to compile.
            QueueFullError, UnavailableError: the machine is too busy, or the process was killed.
        """
        self._templates = {"sources": dict(sources), "special_tokens": dict(special_tokens)}
        self._process: WorkerProcess | None = None
        self._lock = threading.Lock()
        self._waiting = threading.BoundedSemaphore(MOST_WAITING)
        try:
            self.variables: dict[str, list[str]] = self._start()
        except WorkerLostError as error:
            raise _killed() from error

    def render(self, name: str, values: Mapping[str, Any]) -> str:
        """The text that the template `name` makes of JSON-like `values`.

        Raises:
            InputError: the template fails, or (`TemplateLimitError`) goes beyond a limit; the message says which.
            QueueFullError: `MOST_WAITING` others wait or run, or the machine is too busy.
            UnavailableError: the process was killed twice, say by the kernel for want of memory, or closed.
        """
        try:
            message = json.dumps({"name": name, "values": values})
        except (RecursionError, TypeError, ValueError) as error:
            raise InputError(f"they are no JSON, or nested too deeply ({error})") from error
        if not self._waiting.acquire(blocking=False):
            raise QueueFullError(f"{MOST_WAITING} conversations wait to be rendered already; try again in 1 s", 1.0)
        try:
            with self._lock:
                text: str = self._render(message.encode())["text"]
        finally:
            self._waiting.release()
        return text

    def _render(self, message: bytes) -> dict[str, Any]:
        for _ in range(2):  # that it is killed from outside is no fault of this conversation
            try:
                if self._process is None or not self._process.runs:
                    self._start()
                assert self._process is not None
                return _reply(self._process, message, WALL_SECONDS)
            except WorkerLostError:
                if self._process is None:  # closed
                    break
        raise _killed()

    def _start(self) -> dict[str, list[str]]:
        if self._process is not None:
            self._process.close()
        process = self._process = WorkerProcess(PROGRAM)
        limits = {"seconds": SECONDS, "wall_seconds": WALL_SECONDS, "memory": MEMORY_BYTES}
        first = (json.dumps(one).encode() for one in ({**limits, "characters": MOST_CHARACTERS}, self._templates))
        try:
            variables: dict[str, list[str]] = _reply(process, b"\n".join(first), START_SECONDS)["variables"]
        except InputError:
            process.close()
            raise
        return variables

    def close(self) -> None:
        """End the process; who waits for a text gets an error."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with self._lock:
                process.close()

    def __del__(self) -> None:
        if "_process" in self.__dict__:
            self.close()


def _reply(process: WorkerProcess, message: bytes, seconds: float) -> dict[str, Any]:
    """What the process makes of a message.

    Raises:
        InputError, QueueFullError: see `TemplateProcess.render`.
        WorkerLostError: it was killed from outside.
    """
    beyond = f"it takes more than {SECONDS:g} s, or {MEMORY_BYTES >> 20} MB"
    busy = f"the machine is too busy to render it within {seconds:g} s; try again in {RETRY_SECONDS:g} s"
    try:
        reply = process.exchange(message, seconds + 1)
    except TimeoutError as error:
        raise QueueFullError(busy, RETRY_SECONDS) from error
    except WorkerLostError as error:
        if error.code in (-signal.SIGKILL, -signal.SIGTERM):
            raise
        if error.code == -signal.SIGALRM:
            raise QueueFullError(busy, RETRY_SECONDS) from error
        raise TemplateLimitError(beyond) from error
    if "limit" in reply:
        raise TemplateLimitError(reply["limit"])
    if "error" in reply:
        raise InputError(reply["error"])
    return reply


def _killed() -> UnavailableError:
    text = f"the process that renders conversations was killed; try again in {RETRY_SECONDS:g} s"
    return UnavailableError(text, RETRY_SECONDS)
