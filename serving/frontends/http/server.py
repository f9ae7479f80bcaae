"""The HTTP server: one port, in the event loop of the server."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from sharp.serving.frontends.service import UNREAD_SECONDS
from sharp.serving.server.address import listen
from sharp.serving.server.tls import Tls

LAST_MESSAGES_SECONDS = 1
# Longer than the 60 seconds for which proxies keep idle connections: the side that closes first must be theirs, or a
# request that they send just then is lost.
KEEP_ALIVE_SECONDS = 75


class HttpServer:
    """Serves an application from start to stop."""

    def __init__(self, app: Starlette, host: str, port: int, tls: Tls | None = None, name: str = "--http-port") -> None:
        """Bind the port, a setting of that `name`; with `tls`, for HTTPS.

        Raises:
            InputError: the address cannot be bound.
        """
        self._socket = listen(host, port, name)
        self.port = int(self._socket.getsockname()[1])
        config = uvicorn.Config(
            app,
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=LAST_MESSAGES_SECONDS,
        )
        config.load()
        if tls is not None:
            config.ssl = tls.http_context()
        self._server = _Server(config)
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start accepting connections."""
        self._serving = asyncio.create_task(self._server.serve([self._socket]))
        started = asyncio.create_task(self._server.listening.wait())
        await asyncio.wait({self._serving, started}, return_when=asyncio.FIRST_COMPLETED)
        started.cancel()

    async def stop(self) -> None:
        """End; what still runs has a moment to send its last messages."""
        self._server.should_exit = True
        if self._serving:
            await self._serving
        self._socket.close()


class _Protocol(H11Protocol):
    """Cuts a connection whose client takes nothing for `UNREAD_SECONDS`.

    uvicorn itself waits for a reader without end: a request that was stopped long ago would keep its handler and its
    connection, and closing the connection would wait for the same reader.
    """

    _cut: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=1, low=0)  # pause at whatever does not leave, until all of it has left

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`."""
        super().pause_writing()
        self._cut = self.loop.call_later(UNREAD_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        super().resume_writing()
        self._keep()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        super().connection_lost(exc)
        self._keep()

    def _keep(self) -> None:
        if self._cut is not None:
            self._cut.cancel()
            self._cut = None


class _Server(uvicorn.Server):
    """Says when it listens, and leaves signals to the process, of which it is only a part."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start accepting connections."""
        await super().startup(sockets)
        self.listening.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take none."""
        yield
