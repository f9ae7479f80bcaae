"""`TemplateProcess`: chat templates run in another process, where their time, memory and output are limited."""

import contextlib
import json
import select
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sharp.serving.api.errors import InputError, QueueFullError

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
        """
        self._templates = {"sources": dict(sources), "special_tokens": dict(special_tokens)}
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._waiting = threading.BoundedSemaphore(MOST_WAITING)
        self.variables: dict[str, list[str]] = self._start()

    def render(self, name: str, values: Mapping[str, Any]) -> str:
        """The text that the template `name` makes of JSON-like `values`.

        Raises:
            InputError: the template fails, or (`TemplateLimitError`) goes beyond a limit; the message says which.
            QueueFullError: `MOST_WAITING` others wait or run.
        """
        try:
            message = json.dumps({"name": name, "values": values})
        except (RecursionError, TypeError, ValueError) as error:
            raise InputError(f"they are no JSON, or nested too deeply ({error})") from error
        if not self._waiting.acquire(blocking=False):
            raise QueueFullError(f"{MOST_WAITING} conversations wait to be rendered already; try again in 1 s", 1.0)
        try:
            with self._lock:
                if self._process is None or self._process.poll() is not None:
                    self._start()
                reply = self._exchange(message, WALL_SECONDS)
        finally:
            self._waiting.release()
        text: str = _checked(reply)["text"]
        return text

    def _start(self) -> dict[str, list[str]]:
        self.close()
        command = [sys.executable, "-P", str(PROGRAM)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        limits = {"seconds": SECONDS, "wall_seconds": WALL_SECONDS, "memory": MEMORY_BYTES}
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the next message finds out
            self._process.stdin.write(json.dumps({**limits, "characters": MOST_CHARACTERS}).encode() + b"\n")
        reply = self._exchange(json.dumps(self._templates), START_SECONDS)
        try:
            variables: dict[str, list[str]] = _checked(reply)["variables"]
        except InputError:
            self.close()
            raise
        return variables

    def _exchange(self, message: str, seconds: float) -> dict[str, Any] | None:
        """The reply to a message; None if there is none in time, and the process is gone."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(message.encode() + b"\n")
            process.stdin.flush()
            if select.select([process.stdout], [], [], seconds + 1)[0] and (line := process.stdout.readline()):
                reply: dict[str, Any] = json.loads(line)
                return reply
        except (OSError, ValueError):  # it is gone, perhaps in the middle of a line
            pass
        self.close()
        return None

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()

    def __del__(self) -> None:
        if "_process" in self.__dict__:
            self.close()


def _checked(reply: dict[str, Any] | None) -> dict[str, Any]:
    if reply is None:
        raise TemplateLimitError(f"it takes more than {SECONDS:g} s, or {MEMORY_BYTES >> 20} MB")
    if "limit" in reply:
        raise TemplateLimitError(reply["limit"])
    if "error" in reply:
        raise InputError(reply["error"])
    return reply
