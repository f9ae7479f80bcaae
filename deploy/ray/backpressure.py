"""Backpressure: messages for a reader, and how many of them may be sent before it has read the first.

In Serve only gRPC, between its proxies and replicas, waits for a reader. Waiting here, too, makes a client that does
not read a matter of `sharp.serving.frontends.service`, which bounds what waits for it and then stops its request.
"""

import asyncio
import struct
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.types import Message, Send

Give = Callable[[Any], Awaitable[None]]
AHEAD = 16  # messages given and not yet taken
LENGTH = struct.Struct("<I")
# Without them Serve has queues of its own, without a limit, between a replica and its proxies.
BOUNDED_BY = {
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}


def missing_settings(environment: Mapping[str, str]) -> str:
    """What the environment must say for unread responses to be bounded; nothing where it does."""
    return " ".join(f"{name}={value}" for name, value in BOUNDED_BY.items() if environment.get(name) != value)


class Batch:
    """Messages that Serve takes for one, as each that goes through it costs a proxy and a replica some work."""

    def __init__(self, messages: Sequence[Any]) -> None:
        self._messages = messages

    def SerializeToString(self) -> bytes:  # noqa: N802
        """All of them, each after its length."""
        written = [message.SerializeToString() for message in self._messages]
        return b"".join(LENGTH.pack(len(one)) + one for one in written)


def unpacked(batch: bytes) -> Iterator[bytes]:
    """The messages of a batch."""
    start = 0
    while start < len(batch):
        (length,) = LENGTH.unpack_from(batch, start)
        start += LENGTH.size + length
        yield batch[start - length : start]


async def handed_over(fill: Callable[[Give], Awaitable[None]]) -> AsyncGenerator[Batch]:
    """What `fill` gives, as it comes, and at the end its error. Who stops reading cancels it, wherever it waits."""
    messages: asyncio.Queue[Any] = asyncio.Queue()
    room = asyncio.Semaphore(AHEAD)

    async def give(message: Any) -> None:
        await room.acquire()
        messages.put_nowait(message)

    async def run() -> None:
        try:
            await fill(give)
        finally:
            messages.put_nowait(None)

    running = asyncio.create_task(run())
    try:
        ended = False
        while not ended:
            batch = [await messages.get()]
            while not messages.empty():
                batch.append(messages.get_nowait())
            if ended := batch[-1] is None:
                batch.pop()
            if batch:
                yield Batch(batch)
            for _ in batch:
                room.release()
        await running
    finally:
        running.cancel()
        await asyncio.wait([running])


def held_back(send: Send) -> Send:
    """Serve's `send`, which puts messages into a queue of a replica, waiting until its proxy has taken earlier ones."""
    room = asyncio.Semaphore(AHEAD)
    # Serve may read its queue in a thread of its own.
    taken = partial(asyncio.get_running_loop().call_soon_threadsafe, room.release)

    async def send_when_taken(message: Message) -> None:
        await room.acquire()
        await send(_Message(message, taken))

    return send_when_taken


class _Message(dict[str, Any]):
    """A message that tells when it leaves: when Serve pickles it for its proxy, or has no more use for it."""

    def __init__(self, message: Message, taken: Callable[[], Any]) -> None:
        super().__init__(message)
        self._taken = weakref.finalize(self, taken)

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        self._taken()
        return dict, (dict(self),)
