"""`Protocol`: a connection of the HTTP port, with time limits for everything that its client has to do."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, NoReturn

import h11
from h11 import RemoteProtocolError
from h11._receivebuffer import ReceiveBuffer
from uvicorn.protocols.http.h11_impl import H11Protocol

from sharp.serving.config import ServerConfig
from sharp.serving.frontends.http.connections import Connections, Waiting
from sharp.serving.frontends.service import UNREAD_SECONDS
from sharp.serving.observability.refusals import Refusals

LATE = "The {part} of the request did not come within {seconds:g} s."
TIMEOUT = 408
HEADER_BYTES = 2**15
REASONS = {TIMEOUT: "timeout"}
LINE_END = 2  # bytes of CR and LF
BAD_REQUEST, TOO_LARGE = 400, 431


class StrictBuffer(ReceiveBuffer):
    """The bytes that h11 has received but not read yet, which refuses heads that two programs may read in two ways.

    h11 accepts all that RFC 9112 allows a server to accept. A proxy in front may read the same bytes differently, and
    then a request can hide in the body of another request (request smuggling). So these heads are refused, and the
    connection ends:

    - Content-Length beside Transfer-Encoding, or Transfer-Encoding in HTTP/1.0 (RFC 9112 6.1);
    - lines that end without CR (2.2), and lines that continue in the next line (obs-fold, 5.2).

    Attributes:
        problem: the status and the message of a refused head.
    """

    def __init__(self, most_bytes: int) -> None:
        super().__init__()
        self.problem: tuple[int, str] | None = None
        self._most_bytes = most_bytes

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """Take the lines of a head from the buffer and return them; None while the head is not complete.

        Raises:
            RemoteProtocolError: the head is too large, or could be read in two ways.
        """
        before = len(self)
        lines: list[bytearray] | None = super().maybe_extract_lines()
        if lines is None:
            if before > self._most_bytes:
                self._refuse(f"the header has more than {self._most_bytes} bytes, the limit", TOO_LARGE)
            return None
        read = before - len(self)
        if read > self._most_bytes:
            self._refuse(f"the header has more than {self._most_bytes} bytes, the limit", TOO_LARGE)
        if read != sum(len(line) + LINE_END for line in lines) + LINE_END:
            self._refuse("a line of the header does not end with CR and LF")
        if any(line.startswith((b" ", b"\t")) for line in lines):
            self._refuse("a line of the header goes on in the next one")
        names = {bytes(line.partition(b":")[0]).strip().lower() for line in lines}
        if b"transfer-encoding" in names and (b"content-length" in names or lines[0].endswith(b"HTTP/1.0")):
            self._refuse("the length of the body is given in two ways, or in one that HTTP/1.0 has not")
        return lines

    def _refuse(self, sentence: str, status: int = BAD_REQUEST) -> NoReturn:
        """Keep status and sentence of a malformed request as `problem`, and raise h11's RemoteProtocolError."""
        self.problem = (status, sentence)
        raise RemoteProtocolError(sentence, error_status_hint=status)


class Protocol(H11Protocol):
    """A connection that ends when its client is too slow with a header, with a body, or with reading.

    uvicorn itself waits without end for all three. A request that was stopped long ago would keep its handler and its
    connection, and closing the connection would wait for the same reader.
    """

    def __init__(
        self, limits: ServerConfig, connections: Connections, app: Any, refusals: Refusals | None, **uvicorns: Any
    ) -> None:
        """Serve this connection with `app`; `uvicorns` are the arguments of uvicorn's own class.

        `refusals` counts the requests that are refused before they reach `app`.
        """
        super().__init__(**uvicorns)
        self.app = app
        self._received = StrictBuffer(HEADER_BYTES)
        self.conn._receive_buffer = self._received  # h11 has no public way to be stricter
        self._limits = limits
        self._connections = connections
        self._refusals = refusals
        self._unread: asyncio.TimerHandle | None = None
        self._late: asyncio.TimerHandle | None = None
        self._awaited: tuple[str, object] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Set up the connection, and start the time for the header of the first request."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=1, low=0)  # pause until all bytes have left
        self._await_client()

    def data_received(self, data: bytes) -> None:
        """Read data of the client, and restart the time if the client has to send another part next."""
        super().data_received(data)
        self._await_client()

    def on_response_complete(self) -> None:
        """End the response, and wait for the next request of the client."""
        super().on_response_complete()
        self._await_client()

    def pause_writing(self) -> None:
        """Pause writing, and abort the connection if it does not resume within `UNREAD_SECONDS`."""
        super().pause_writing()
        self._unread = self.loop.call_later(UNREAD_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Resume writing, and stop the time for reading."""
        super().resume_writing()
        _cancel(self._unread)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers, and forget the connection."""
        super().connection_lost(exc)
        _cancel(self._unread)
        _cancel(self._late)
        self._unset_keepalive_if_required()
        self._connections.remove(self)

    def _await_client(self) -> None:
        """Start the time for the client's next part, unless it runs already: a byte now and then changes nothing."""
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
        served = awaited[0] == "body" and not self.cycle.response_complete
        waiting = Waiting.BODY if served else Waiting.REQUEST
        self._connections.waits(self, self.transport.abort, waiting, self.client[0] if self.client else "")
        if awaited[0] != "idle":  # uvicorn itself ends idle connections
            seconds = self._limits.header_seconds if awaited[0] == "header" else self._limits.body_seconds
            self._late = self.loop.call_later(seconds, self._end_late, awaited[0], seconds)

    def _next_part(self) -> tuple[str, object] | None:
        """Return which part of which request the client has to send next; None while the client has to wait."""
        if self.conn.their_state is h11.SEND_BODY:
            return "body", self.cycle
        if self.conn.their_state is h11.IDLE:
            return "header" if self.cycle is None or self.conn.trailing_data[0] else "idle", self.cycle
        return None

    def _end_late(self, part: str, seconds: float) -> None:
        """Close a connection whose `part` did not arrive within `seconds`; status 408 if some of the request did."""
        if part == "body" or self.conn.trailing_data[0]:
            self._refuse(TIMEOUT, LATE.format(part=part, seconds=seconds))
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Refuse data that is not HTTP, perhaps in the middle of a body, and close; uvicorn calls this method."""
        self._refuse(*(self._received.problem or (BAD_REQUEST, msg)))
        self.transport.close()

    def _refuse(self, status: int, sentence: str) -> None:
        """Send a response of this status with the sentence in JSON, unless the application's response has begun."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # so that the application says nothing more
            self.cycle.message_event.set()
        if self._refusals is not None:
            self._refusals.count("http", str(status), REASONS.get(status, "malformed"))
        headers = [("content-type", "text/plain; charset=utf-8"), ("connection", "close")]
        response = h11.Response(status_code=status, headers=headers)
        with suppress(h11.LocalProtocolError):  # a response has begun
            for event in (response, h11.Data(data=sentence.encode()), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    """Cancel the timer, if there is one."""
    if timer is not None:
        timer.cancel()


def health_only(app: Any, paths: tuple[str, ...], refuse: Any) -> Callable[[Any, Any, Any], Awaitable[None]]:
    """Return an application for a connection beyond the limit: `refuse` for all but health. It serves one request."""

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        """Serve health checks by the application and refuse all else; close the connection afterwards."""

        async def closing(message: Any) -> None:
            """Send a message, with the header "connection: close" at the start of the response."""
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        await (app if scope["path"] in paths else refuse)(scope, receive, closing)

    return serve
