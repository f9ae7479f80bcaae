"""The HTTP server: one port, in the event loop of the server."""

import asyncio
import errno
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette

from sharp.serving.api.errors import UnavailableError
from sharp.serving.config import ServerConfig
from sharp.serving.frontends.http.connections import Admission, Connections
from sharp.serving.frontends.http.errors import error_response
from sharp.serving.frontends.http.protocol import HEADER_BYTES, Protocol, health_only
from sharp.serving.observability.refusals import Refusals
from sharp.serving.security.address import listen
from sharp.serving.security.open_access import HTTP_PROBES
from sharp.serving.security.tls import Tls

logger = logging.getLogger(__name__)

LAST_MESSAGES_SECONDS = 1
BACKLOG = 1024
HEALTH_PATHS = (*HTTP_PROBES, "/metrics")
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
ACCEPT_RETRY_SECONDS = 0.1
ENDED_SECONDS = 0.02  # the pause after a connection was closed to make room, in which the new one may send
TOO_MANY = "the server has {most} connections, the limit; try again in 1 s"


class HttpServer:
    """An HTTP server of one ASGI application on one port: `start` accepts connections, `stop` ends them."""

    def __init__(
        self,
        app: Starlette,
        config: ServerConfig,
        port: int,
        tls: Tls | None = None,
        name: str = "--http-port",
        refusals: Refusals | None = None,
    ) -> None:
        """Bind the port, which messages call by its setting's `name`; with `tls`, serve HTTPS.

        `refusals` counts refused connections and requests; without it none are counted.

        Raises:
            InputError: the address cannot be bound, or a file of `tls` cannot be used.
        """
        self._socket = listen(config.host, port, name)
        self.port = int(self._socket.getsockname()[1])
        uvicorns = uvicorn.Config(
            app,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            # This should be longer than the 60 seconds for which proxies keep idle connections. The proxy must close
            # first, because a request that it sends while the server closes is lost.
            timeout_keep_alive=config.idle_seconds,  # type: ignore[arg-type]  # uvicorn takes a float as well
            timeout_graceful_shutdown=LAST_MESSAGES_SECONDS,
            h11_max_incomplete_event_size=HEADER_BYTES,
            proxy_headers=False,  # a client may write anything there
        )
        uvicorns.load()
        if tls is not None:
            uvicorns.ssl = tls.http_context()
        self._server = _Server(uvicorns, config, refusals)
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start accepting connections."""
        self._serving = asyncio.create_task(self._server.serve([self._socket]))
        started = asyncio.create_task(self._server.listening.wait())
        await asyncio.wait({self._serving, started}, return_when=asyncio.FIRST_COMPLETED)
        started.cancel()

    async def stop(self) -> None:
        """Stop the server; requests that still run have a moment to send their last messages."""
        self._server.should_exit = True
        if self._serving:
            await self._serving
        self._socket.close()


class _Server(uvicorn.Server):
    """A uvicorn server that limits its connections, says when it listens, and leaves signals to the process.

    asyncio's own acceptor takes all connections, and without a free file descriptor it tries, and logs, thousands of
    times a second.
    """

    def __init__(self, config: uvicorn.Config, limits: ServerConfig, refusals: Refusals | None) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self._limits = limits
        self._refusals = refusals
        self._connections = Connections(limits.max_connections)
        self._accepting: set[asyncio.Task[None]] = set()
        refusal = error_response(UnavailableError(TOO_MANY.format(most=limits.max_connections), 1.0))
        self._apps = {
            Admission.ALL: config.loaded_app,
            Admission.HEALTH: health_only(config.loaded_app, HEALTH_PATHS, refusal),
        }

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections on the listening sockets."""
        self.servers = []
        for listener in sockets or ():
            listener.setblocking(False)
            listener.listen(BACKLOG)
            self._listen(listener)
        self.started = True
        self.listening.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more connections on the listening sockets, and end the open ones."""
        for listener in sockets or ():
            asyncio.get_running_loop().remove_reader(listener)
        for task in self._accepting:
            task.cancel()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Return a context that does nothing, because Sharp's process handles signals, not uvicorn."""
        yield

    def _listen(self, listening: socket.socket) -> None:
        """Watch a listening socket for connections, unless the server is ending."""
        if not self.should_exit and listening.fileno() >= 0:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        """Accept one connection. If the process has no descriptor left, end the oldest idle connection and wait."""
        try:
            accepted, address = listening.accept()
        except OSError as error:
            if error.errno in NO_DESCRIPTOR:
                logger.warning("a connection cannot be accepted: %s; the oldest idle one is closed", error.strerror)
                seconds = ENDED_SECONDS if self._connections.end_one() else ACCEPT_RETRY_SECONDS
                loop = asyncio.get_running_loop()
                loop.remove_reader(listening)
                loop.call_later(seconds, self._listen, listening)
            return  # after any other error the client has gone
        accepted.setblocking(False)
        admission = self._connections.admit()
        if admission is not Admission.ALL:
            if self._refusals is not None:
                self._refusals.count("http", "503", "connections")
            logger.warning("there are %d connections, the limit; a new one is refused", self._limits.max_connections)
        if admission is Admission.NOTHING:
            accepted.close()
            return
        task = asyncio.get_running_loop().create_task(self._take(accepted, admission))
        self._accepting.add(task)
        task.add_done_callback(self._accepting.discard)
        self._connections.waits(task, task.cancel, host=address[0])

    async def _take(self, accepted: socket.socket, admission: Admission) -> None:
        """Serve a connection, which with TLS begins with a handshake."""

        def protocol() -> Protocol:
            """Return the HTTP protocol of a new connection, with the application that its admission allows."""
            uvicorns = {"config": self.config, "server_state": self.server_state, "app_state": {}, "_loop": loop}
            return Protocol(self._limits, self._connections, self._apps[admission], self._refusals, **uvicorns)

        loop = asyncio.get_running_loop()
        seconds = None if self.config.ssl is None else self._limits.header_seconds
        try:
            await loop.connect_accepted_socket(protocol, accepted, ssl=self.config.ssl, ssl_handshake_timeout=seconds)
        except OSError:  # the client has gone, or is none for this TLS
            accepted.close()
        except asyncio.CancelledError:
            accepted.close()
            raise
        finally:
            task = asyncio.current_task()
            self._connections.remove(task)
