"""`Pool`: threads for what would hold up the event loop, with a bounded queue."""

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from sharp.serving.api.errors import QueueFullError

Result = TypeVar("Result")
RETRY_SECONDS = 1.0


class Pool:
    """Runs functions in threads of its own. The threads end with the process: none can keep it alive."""

    def __init__(self, name: str, threads: int, most_waiting: int) -> None:
        self._name = name
        self._threads = threads
        self._most_waiting = most_waiting
        self._jobs: queue.SimpleQueue[tuple[asyncio.AbstractEventLoop, asyncio.Future[Any], Callable[[], Any]] | None]
        self._jobs = queue.SimpleQueue()
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
        self._jobs.put((loop, future, job))
        if self._started < min(self._threads, self._taken):
            self._started += 1
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        return await future

    def close(self) -> None:
        """End the threads after what they do now."""
        for _ in range(self._started):
            self._jobs.put(None)

    def _work(self) -> None:
        while (taken := self._jobs.get()) is not None:
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
