"""Admission: the memory (`Buffers`) and the threads (`Pool`) that requests may take before the engine has them."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias, TypeVar

from sharp.serving.api.errors import QueueFullError
from sharp.serving.engine.served_model import ServedModel

Result = TypeVar("Result")
Job: TypeAlias = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Any]", Callable[[], Any]]
RETRY_SECONDS = 1.0
# The bytes that a request may need beside the text of its prompt: schemas, tools, the structure of messages.
BASE_BYTES = 2**20


def most_request_bytes(model: ServedModel, most: int) -> int:
    """Return the size in bytes of the largest request that may be valid for a model, at most `most`."""
    return min(most, BASE_BYTES + model.token_bytes * model.request_limit)


class Held:
    """The bytes of a request's body while it is read and parsed, counted in `Buffers`."""

    def __init__(self, buffers: "Buffers") -> None:
        self._buffers = buffers
        self._bytes = 0
        self._parts: list[bytes] = []

    def add(self, part: bytes) -> None:
        """Hold one more part of the request.

        Raises:
            QueueFullError: all requests together would hold more than the limit of `Buffers`.
        """
        buffers, count = self._buffers, len(part)
        if buffers.bytes + count > buffers.most:
            message = f"requests that are being received hold {buffers.bytes / 2**20:.1f} MiB; the limit is"
            raise QueueFullError(f"{message} {buffers.most / 2**20:.1f} MiB; try again in 1 s", RETRY_SECONDS)
        buffers.bytes += count
        self._bytes += count
        self._parts.append(part)

    def take(self) -> bytes:
        """Return all parts joined, and drop them here. Their bytes count until `release`."""
        parts, self._parts = self._parts, []
        return b"".join(parts)

    def release(self) -> None:
        """Stop counting the bytes of the request, because the engine has it."""
        self._buffers.bytes -= self._bytes
        self._bytes = 0
        self._parts = []


class Buffers:
    """The memory that requests hold before the engine has them, over all connections of one event loop."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.bytes = 0

    @contextmanager
    def hold(self) -> Iterator[Held]:
        """Yield a `Held` whose bytes are released at the end of the block, if not before."""
        held = Held(self)
        token = _HELD.set(held)
        try:
            yield held
        finally:
            held.release()
            _HELD.reset(token)


_HELD: ContextVar[Held | None] = ContextVar("held", default=None)


def release_held() -> None:
    """Release the bytes that the request of this task holds, because the engine has the request."""
    if held := _HELD.get():
        held.release()


class Pool:
    """Threads with a bounded queue, for work that would block the event loop.

    The clients that have waiting jobs are served in rotation. If the queue is full, the client with most waiting jobs
    loses its last one to a client that has fewer. The threads are daemons, so they do not keep the process alive. The
    name of a pool says in messages what happens to waiting requests, such as "parsed".
    """

    def __init__(self, name: str, threads: int, most_waiting: int) -> None:
        self._name = name
        self._threads = threads
        self._most_waiting = most_waiting
        # The waiting jobs of every client that has some; the client whose turn is next is the first. `_work` in the
        # threads and the methods in the event loop hold the lock of `_changed` while they read or write it.
        self._waiting: dict[str, deque[Job]] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._started = 0
        self._taken = 0  # jobs that run or wait

    async def run(self, job: Callable[[], Result], client: str = "", *, always: bool = False) -> Result:
        """Run a function for a client in a thread, and return its result or raise its error.

        `always` admits the function to a full queue, too, which the probe of `Health` needs.

        Raises:
            QueueFullError: too many functions wait already, or another client took the place of this one.
            RuntimeError: the function raised `StopIteration`, or what is no `Exception`, such as a panic of Rust.
        """
        full = self._taken >= self._threads + self._most_waiting
        if full and not always and not self._push_out(client):
            raise self._refusal()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        self._taken += 1
        waiting = (loop, future, job)
        with self._changed:
            self._waiting.setdefault(client, deque()).append(waiting)
            self._changed.notify()
        if self._started < min(self._threads, self._taken):
            self._started += 1
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        try:
            return await future
        except asyncio.CancelledError:
            if self._remove(client, waiting):
                self._taken -= 1
            raise

    def _refusal(self) -> QueueFullError:
        """Return the error for a full queue, with the seconds after which to try again."""
        message = f"{self._most_waiting} requests wait to be {self._name} already"
        return QueueFullError(f"{message}; try again in {RETRY_SECONDS:g} s", RETRY_SECONDS)

    def _push_out(self, client: str) -> bool:
        """Refuse the last waiting job of the client with most of them, if `client` has at least two fewer."""
        with self._changed:
            longest = max(self._waiting, key=lambda name: len(self._waiting[name]), default=client)
            own = len(self._waiting.get(client, ()))
            if not self._waiting or len(self._waiting[longest]) < own + 2:
                return False
            _, future, _ = self._waiting[longest].pop()
        self._taken -= 1
        if not future.cancelled():
            future.set_exception(self._refusal())
        return True

    def _remove(self, client: str, job: Job) -> bool:
        """Remove a waiting job; return False if a thread has taken it."""
        with self._changed:
            jobs = self._waiting.get(client, deque())
            if job not in jobs:
                return False
            jobs.remove(job)
            if not jobs:
                del self._waiting[client]
            return True

    def _next(self) -> Job | None:
        """Wait for a job and return it, or None after the last job of a closed pool."""
        with self._changed:
            while not self._waiting:
                if self._closed:
                    return None
                self._changed.wait()
            client = next(iter(self._waiting))
            jobs = self._waiting.pop(client)
            job = jobs.popleft()
            if jobs:
                self._waiting[client] = jobs  # the last in the rotation
            return job

    def close(self) -> None:
        """End the threads after the jobs that are queued now."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _work(self) -> None:
        """Run jobs and pass each result to its caller's event loop, until the pool ends; the threads' function."""
        while (taken := self._next()) is not None:
            loop, future, job = taken
            result, error = None, None
            if not future.cancelled():  # otherwise the client has gone, and nobody waits
                try:
                    result = job()
                except BaseException as caught:  # a Rust panic is a BaseException, not an Exception
                    error = caught
            try:
                loop.call_soon_threadsafe(self._done, future, result, error)
            except RuntimeError:  # the event loop has ended
                return
            del taken, future, job, result, error  # they may be large, and the next wait may be long

    def _done(self, future: "asyncio.Future[Any]", result: Any, error: BaseException | None) -> None:
        """Set the job's result or error in its future; runs in the event loop."""
        self._taken -= 1
        if future.cancelled():
            return
        if error is None:
            future.set_result(result)
        elif isinstance(error, Exception) and not isinstance(error, StopIteration):
            future.set_exception(error)
        else:  # a future refuses StopIteration, and callers handle no BaseException
            failure = RuntimeError(f"{type(error).__name__}: {error}")
            failure.__cause__ = error
            future.set_exception(failure)
