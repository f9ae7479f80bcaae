"""Admission: what requests may take before the engine has them, `Buffers` their memory and `Pool` their threads."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, TypeAlias, TypeVar

from sharp.serving.api.errors import QueueFullError
from sharp.serving.engine.model_folder import ModelFolder

Result = TypeVar("Result")
Job: TypeAlias = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Any]", Callable[[], Any]]
RETRY_SECONDS = 1.0
# What a request needs beside its prompt: schemas, tools, messages.
BASE_BYTES = 2**20


def most_request_bytes(model: ModelFolder, most: int) -> int:
    """The largest request that may be valid for a model, but not above `most`."""
    return min(most, BASE_BYTES + model.token_bytes * model.request_limit)


class Held:
    """What one request holds."""

    def __init__(self, buffers: "Buffers") -> None:
        self._buffers = buffers
        self._bytes = 0
        self._parts: list[bytes] = []

    def add(self, part: bytes) -> None:
        """Hold a part of the request more.

        Raises:
            QueueFullError: all requests together would hold too much.
        """
        buffers, count = self._buffers, len(part)
        if buffers.bytes + count > buffers.most:
            message = f"requests that are being received hold {buffers.bytes / 2**20:.1f} MiB; the limit is"
            raise QueueFullError(f"{message} {buffers.most / 2**20:.1f} MiB; try again in 1 s", RETRY_SECONDS)
        buffers.bytes += count
        self._bytes += count
        self._parts.append(part)

    def take(self) -> bytes:
        """All parts, which are not kept here any longer; they count until `release`."""
        parts, self._parts = self._parts, []
        return b"".join(parts)

    def release(self) -> None:
        """The engine has the request."""
        self._buffers.bytes -= self._bytes
        self._bytes = 0
        self._parts = []


class Buffers:
    """How much of requests the server holds before the engine has them, over all connections of one event loop."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.bytes = 0

    @contextmanager
    def hold(self) -> Iterator[Held]:
        """What is added inside is held until the end of the block at the latest."""
        held = Held(self)
        token = _HELD.set(held)
        try:
            yield held
        finally:
            held.release()
            _HELD.reset(token)


_HELD: ContextVar[Held | None] = ContextVar("held", default=None)


def release_held() -> None:
    """Release what the request of this task holds: the engine has it."""
    if held := _HELD.get():
        held.release()


class Pool:
    """Runs what would hold up the event loop in threads of its own, with a bounded queue.

    The threads end with the process: none can keep it alive.
    """

    def __init__(self, name: str, threads: int, most_waiting: int) -> None:
        self._name = name
        self._threads = threads
        self._most_waiting = most_waiting
        self._jobs: deque[Job | None] = deque()
        self._added = threading.Semaphore(0)  # how often a thread looks for a job
        self._started = 0
        self._taken = 0  # jobs that run or wait

    async def run(self, job: Callable[[], Result], *, always: bool = False) -> Result:
        """The result of a function. `always` admits it to a full queue too, as health's probe is.

        Raises:
            QueueFullError: too many wait.
        """
        if not always and self._taken >= self._threads + self._most_waiting:
            message = f"{self._most_waiting} requests wait to be {self._name} already"
            raise QueueFullError(f"{message}; try again in {RETRY_SECONDS:g} s", RETRY_SECONDS)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        self._taken += 1
        waiting = (loop, future, job)
        self._put(waiting)
        if self._started < min(self._threads, self._taken):
            self._started += 1
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        try:
            return await future
        except asyncio.CancelledError:
            with suppress(ValueError):  # a thread has it
                self._jobs.remove(waiting)
                self._taken -= 1
            raise

    def _put(self, job: Job | None) -> None:
        self._jobs.append(job)
        self._added.release()

    def _next(self) -> Job | None:
        while True:
            self._added.acquire()
            with suppress(IndexError):  # its client has gone
                return self._jobs.popleft()

    def close(self) -> None:
        """End the threads after what they do now."""
        for _ in range(self._started):
            self._put(None)

    def _work(self) -> None:
        while (taken := self._next()) is not None:
            loop, future, job = taken
            result, error = None, None
            if not future.cancelled():  # its client has gone: what nobody waits for is not done
                try:
                    result = job()
                except BaseException as caught:  # a panic of Rust is no Exception
                    error = caught
            try:
                loop.call_soon_threadsafe(self._done, future, result, error)
            except RuntimeError:  # the event loop has ended
                return
            del taken, future, job, result, error  # they may be large

    def _done(self, future: "asyncio.Future[Any]", result: Any, error: BaseException | None) -> None:
        self._taken -= 1
        if future.cancelled():
            return
        if error is None:
            future.set_result(result)
        elif isinstance(error, Exception) and not isinstance(error, StopIteration):
            future.set_exception(error)
        else:  # a future cannot hold these
            failure = RuntimeError(f"{type(error).__name__}: {error}")
            failure.__cause__ = error
            future.set_exception(failure)
