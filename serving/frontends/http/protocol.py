"""`Protocol`: a connection of the HTTP port, with a time for everything that its client has to do."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from sharp.serving.config import ServerConfig
from sharp.serving.frontends.http.connections import Connections
from sharp.serving.frontends.service import UNREAD_SECONDS

LATE = "The {part} of the request did not come within {seconds:g} s."


class Protocol(H11Protocol):
    """Ends a connection whose client is too slow: with a header, with a body, or with reading.

    uvicorn itself waits without end for all three: a request that was stopped long ago would keep its handler and its
    connection, and closing the connection would wait for the same reader.
    """

    def __init__(self, limits: ServerConfig, connections: Connections, app: Any, **uvicorns: Any) -> None:
        """`app` serves this connection; the last arguments are uvicorn's own."""
        super().__init__(**uvicorns)
        self.app = app
        self._limits = limits
        self._connections = connections
        self._unread: asyncio.TimerHandle | None = None
        self._late: asyncio.TimerHandle | None = None
        self._awaited: tuple[str, object] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=1, low=0)  # pause at whatever does not leave, until all of it has left
        self._await_client()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        super().data_received(data)
        self._await_client()

    def on_response_complete(self) -> None:
        """See uvicorn."""
        super().on_response_complete()
        self._await_client()

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`."""
        super().pause_writing()
        self._unread = self.loop.call_later(UNREAD_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        super().resume_writing()
        _cancel(self._unread)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        super().connection_lost(exc)
        _cancel(self._unread)
        _cancel(self._late)
        self._unset_keepalive_if_required()
        self._connections.remove(self)

    def _await_client(self) -> None:
        """Start the time for what the client has to send next, unless it runs: a byte now and then changes nothing."""
        if self.transport.is_closing():
            return
        awaited = self._next_part()
        if awaited == self._awaited and awaited is not None:
            return
        self._awaited = awaited
        _cancel(self._late)
        if awaited is None:
            self._connections.serves(self)
            return
        self._connections.waits(self, self.transport.abort)
        if awaited[0] != "idle":  # that one is uvicorn's
            seconds = self._limits.header_seconds if awaited[0] == "header" else self._limits.body_seconds
            self._late = self.loop.call_later(seconds, self._end_late, awaited[0], seconds)

    def _next_part(self) -> tuple[str, object] | None:
        """What the client has to send next, of which request; None while it has to wait."""
        if self.conn.their_state is h11.SEND_BODY:
            return "body", self.cycle
        if self.conn.their_state is h11.IDLE:
            return "header" if self.cycle is None or self.conn.trailing_data[0] else "idle", self.cycle
        return None

    def _end_late(self, part: str, seconds: float) -> None:
        if self.cycle is not None and part == "body":
            self.cycle.disconnected = True  # so that the application says nothing more
            self.cycle.message_event.set()
        if part == "body" or self.conn.trailing_data[0]:
            text = LATE.format(part=part, seconds=seconds).encode()
            headers = [("content-type", "text/plain; charset=utf-8"), ("connection", "close")]
            with suppress(h11.LocalProtocolError):  # a response has begun
                for event in (h11.Response(status_code=408, headers=headers), h11.Data(data=text), h11.EndOfMessage()):
                    self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def health_only(app: Any, paths: tuple[str, ...], refuse: Any) -> Callable[[Any, Any, Any], Awaitable[None]]:
    """An application for a connection beyond the limit: `refuse` for all but health. It serves one request."""

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        async def closing(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        await (app if scope["path"] in paths else refuse)(scope, receive, closing)

    return serve
