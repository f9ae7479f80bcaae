"""`TemplateProcess`: renders chat templates in another process, where time, memory and output are limited."""

import json
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sharp.serving.api.errors import InputError, QueueFullError, UnavailableError
from sharp.serving.worker_process import RETRY_SECONDS, WorkerLostError, WorkerProcess

SECONDS = 2.0  # CPU time of each rendering; usual renderings take a millisecond
WALL_SECONDS = 8.0  # elapsed time, on a busy machine
MEMORY_BYTES = 160 * 2**20
MOST_CHARACTERS = 2**24  # limit for a rendered text
MOST_WAITING = 64  # renderings run one after the other
START_SECONDS = 60.0
PROGRAM = Path(__file__).with_name("template_worker.py")


class TemplateLimitError(InputError):
    """A template exceeds a limit of time, memory or characters."""


class TemplateProcess:
    """The templates of a model, by name, in a process that is restarted after it is lost. Thread-safe."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """Compile the templates.

        Raises:
            InputError: a text is not a template, or takes too long or too much memory to compile.
            QueueFullError: the machine is too busy.
            UnavailableError: the process was killed.
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
        """Return the text that the template `name` makes of JSON-like `values`.

        Raises:
            InputError: the template fails, or (`TemplateLimitError`) exceeds a limit; the message names the limit.
            QueueFullError: `MOST_WAITING` other renderings wait or run, or the machine is too busy.
            UnavailableError: the process was killed twice, perhaps by the kernel for lack of memory, or was closed.
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
        """Send a message to the process and return its reply; start the process again once if it was killed."""
        for _ in range(2):  # the rendering is repeated once if the process was killed from outside
            try:
                if self._process is None or not self._process.runs:
                    self._start()
                assert self._process is not None
                return _reply(self._process, message, WALL_SECONDS)
            except WorkerLostError:
                if self._process is None:  # `close` was called
                    break
        raise _killed()

    def _start(self) -> dict[str, list[str]]:
        """Start the process with the templates, and return the variables that each template reads."""
        if self._process is not None:
            self._process.close()
        process = self._process = WorkerProcess(PROGRAM)
        limits = {"seconds": SECONDS, "wall_seconds": WALL_SECONDS, "memory": MEMORY_BYTES}
        first = (json.dumps(part).encode() for part in ({**limits, "characters": MOST_CHARACTERS}, self._templates))
        try:
            variables: dict[str, list[str]] = _reply(process, b"\n".join(first), START_SECONDS)["variables"]
        except InputError:
            process.close()
            raise
        return variables

    def close(self) -> None:
        """End the process. Callers that wait for a text get an error."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with self._lock:
                process.close()

    def __del__(self) -> None:
        if "_process" in self.__dict__:
            self.close()


def _reply(process: WorkerProcess, message: bytes, seconds: float) -> dict[str, Any]:
    """Return the process's reply to a message, which must come within about `seconds`.

    Raises:
        InputError: the template fails, or (`TemplateLimitError`) exceeds a limit.
        QueueFullError: the machine is too busy.
        WorkerLostError: the process was killed from outside.
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
    """Return the error for a process that was killed, with the time after which to try again."""
    text = f"the process that renders conversations was killed; try again in {RETRY_SECONDS:g} s"
    return UnavailableError(text, RETRY_SECONDS)
