"""`Buffers`: how much of requests the server holds before the engine has them, over all connections."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from sharp.serving.api.errors import QueueFullError
from sharp.serving.engine.model_folder import ModelFolder

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
    """Lives in one event loop."""

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
