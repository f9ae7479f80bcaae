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
from sharp.serving.frontends.http.protocol import Protocol, health_only
from sharp.serving.security.address import listen
from sharp.serving.security.tls import Tls

logger = logging.getLogger(__name__)

LAST_MESSAGES_SECONDS = 1
BACKLOG = 1024
HEALTH_PATHS = ("/health", "/health/live", "/health/ready", "/ping", "/v2/health/live", "/v2/health/ready", "/metrics")
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
ACCEPT_RETRY_SECONDS = 0.1
ENDED_SECONDS = 0.02  # where another connection has made room; so long has the new one to send its request
HEADER_BYTES = 2**15
TOO_MANY = "the server has {most} connections, the limit; try again in 1 s"


class HttpServer:
    """Serves an application from start to stop."""

    def __init__(
        self, app: Starlette, config: ServerConfig, port: int, tls: Tls | None = None, name: str = "--http-port"
    ) -> None:
        """Bind the port, a setting of that `name`; with `tls`, for HTTPS.

        Raises:
            InputError: the address cannot be bound.
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
            # A time longer than the 60 seconds for which proxies keep idle connections is best: the side that closes
            # first must be theirs, or a request that they send just then is lost.
            timeout_keep_alive=config.idle_seconds,  # type: ignore[arg-type]  # a float serves as well
            timeout_graceful_shutdown=LAST_MESSAGES_SECONDS,
            h11_max_incomplete_event_size=HEADER_BYTES,
        )
        uvicorns.load()
        if tls is not None:
            uvicorns.ssl = tls.http_context()
        self._server = _Server(uvicorns, config)
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


class _Server(uvicorn.Server):
    """Accepts connections within limits, says when it listens, and leaves signals to the process, which it is part of.

    asyncio's own acceptor takes all connections, and without a descriptor it tries, and logs, thousands of times a
    second.
    """

    def __init__(self, config: uvicorn.Config, limits: ServerConfig) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self._limits = limits
        self._connections = Connections(limits.max_connections)
        self._accepting: set[asyncio.Task[None]] = set()
        refusal = error_response(UnavailableError(TOO_MANY.format(most=limits.max_connections), 1.0))
        self._apps = {
            Admission.ALL: config.loaded_app,
            Admission.HEALTH: health_only(config.loaded_app, HEALTH_PATHS, refusal),
        }

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start accepting connections."""
        self.servers = []
        for one in sockets or ():
            one.setblocking(False)
            one.listen(BACKLOG)
            self._listen(one)
        self.started = True
        self.listening.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more, and end what there is."""
        for one in sockets or ():
            asyncio.get_running_loop().remove_reader(one)
        for task in self._accepting:
            task.cancel()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take none."""
        yield

    def _listen(self, listening: socket.socket) -> None:
        if not self.should_exit and listening.fileno() >= 0:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        try:
            accepted, _ = listening.accept()
        except OSError as error:
            if error.errno in NO_DESCRIPTOR:
                logger.warning("a connection cannot be accepted: %s; the oldest idle one is closed", error.strerror)
                seconds = ENDED_SECONDS if self._connections.end_oldest() else ACCEPT_RETRY_SECONDS
                loop = asyncio.get_running_loop()
                loop.remove_reader(listening)
                loop.call_later(seconds, self._listen, listening)
            return  # else the client has gone
        accepted.setblocking(False)
        admission = self._connections.admit()
        if admission is not Admission.ALL:
            logger.warning("there are %d connections, the limit; a new one is refused", self._limits.max_connections)
        if admission is Admission.NOTHING:
            accepted.close()
            return
        task = asyncio.get_running_loop().create_task(self._take(accepted, admission))
        self._accepting.add(task)
        task.add_done_callback(self._accepting.discard)
        self._connections.waits(task, task.cancel)

    async def _take(self, accepted: socket.socket, admission: Admission) -> None:
        """Serve a connection, which with TLS begins with a handshake."""

        def protocol() -> Protocol:
            uvicorns = {"config": self.config, "server_state": self.server_state, "app_state": {}, "_loop": loop}
            return Protocol(self._limits, self._connections, self._apps[admission], **uvicorns)

        loop = asyncio.get_running_loop()
        seconds = None if self.config.ssl is None else self._limits.header_seconds
        try:
            await loop.connect_accepted_socket(protocol, accepted, ssl=self.config.ssl, ssl_handshake_timeout=seconds)
        except OSError:  # it has gone, or is no client for this TLS
            accepted.close()
        except asyncio.CancelledError:
            accepted.close()
            raise
        finally:
            task = asyncio.current_task()
            self._connections.remove(task)
