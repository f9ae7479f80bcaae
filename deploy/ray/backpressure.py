"""Backpressure: a limit of the messages that may be sent before their reader has read the first.

In Serve only gRPC, between proxies and replicas, waits for a reader. This module waits, too, so that unread messages
pile up in `sharp.serving.frontends.service`, which bounds them and then stops the request.
"""

import asyncio
import struct
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.types import Message, Send

Give = Callable[[Any], Awaitable[None]]
AHEAD = 16  # messages that may be given and not yet taken
LENGTH = struct.Struct("<I")
# Without these settings Serve has queues of its own, without a limit, between a replica and its proxies.
BOUNDED_BY = {
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}


def missing_settings(environment: Mapping[str, str]) -> str:
    """Return the settings of Ray, as NAME=VALUE with blanks between, that `environment` lacks; empty if it lacks none.

    Without these settings Serve keeps unread responses in queues that have no limit.
    """
    return " ".join(f"{name}={value}" for name, value in BOUNDED_BY.items() if environment.get(name) != value)


class MessageBatch:
    """Several messages that Serve handles as one, because each message costs a proxy and a replica some work."""

    def __init__(self, messages: Sequence[Any]) -> None:
        self._messages = messages

    def SerializeToString(self) -> bytes:  # noqa: N802
        """Return all messages, each after its length as a little-endian uint32, as `unpacked` reads them."""
        written = [message.SerializeToString() for message in self._messages]
        return b"".join(LENGTH.pack(len(content)) + content for content in written)


def unpacked(batch: bytes) -> Iterator[bytes]:
    """Yield the messages, as bytes, of a batch that `MessageBatch.SerializeToString` wrote."""
    start = 0
    while start < len(batch):
        (length,) = LENGTH.unpack_from(batch, start)
        start += LENGTH.size + length
        yield batch[start - length : start]


async def handed_over(fill: Callable[[Give], Awaitable[None]]) -> AsyncGenerator[MessageBatch]:
    """Yield the messages that `fill` gives, in batches as they come, and raise the error of `fill` at the end.

    `fill` gets an async function and calls it with one message at a time. The call waits while the reader has not taken
    16 (`AHEAD`) earlier messages. A reader that closes the generator cancels `fill`.
    """
    messages: asyncio.Queue[Any] = asyncio.Queue()
    room = asyncio.Semaphore(AHEAD)

    async def give(message: Any) -> None:
        """Queue a message once there is room."""
        await room.acquire()
        messages.put_nowait(message)

    async def run() -> None:
        """Run `fill`, and queue None at its end."""
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
                yield MessageBatch(batch)
            for _ in batch:
                room.release()
        await running
    finally:
        running.cancel()
        await asyncio.wait([running])


def held_back(send: Send) -> Send:
    """Return a `send` that waits while Serve's proxy has not taken 16 (`AHEAD`) earlier messages from the replica.

    Call this function in the running event loop of the application.
    """
    room = asyncio.Semaphore(AHEAD)
    # Serve may read the queue in a thread of its own.
    taken = partial(asyncio.get_running_loop().call_soon_threadsafe, room.release)

    async def send_when_taken(message: Message) -> None:
        """Send a message once the message before it has been taken."""
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
