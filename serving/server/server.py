"""A whole server: engine, gRPC, HTTP and metrics, from start to stop."""

import asyncio
import os
import select
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sharp.serving.api.errors import EngineEndedError
from sharp.serving.config import Settings
from sharp.serving.engine.model_folder import ModelFolder
from sharp.serving.frontends.http.app import make_app
from sharp.serving.frontends.http.server import HttpServer
from sharp.serving.frontends.running import ServerInfo, run_model
from sharp.serving.observability.metrics import Metrics
from sharp.serving.security.address import check_can_listen, join
from sharp.serving.security.tls import Tls
from sharp.serving.security.tokens import tokens_of
from sharp.serving.server.descriptors import allowed_connections
from sharp.serving.server.grpc_server import GrpcServer

EXIT_SECONDS = 3.0  # after the grace period, for what is cancelled to end
EXIT_CODE = 124  # of a process that had to be ended, as of timeout(1)
STDERR = 2
ENGINE_ENDED = 70  # EX_SOFTWARE of sysexits.h: a supervisor should start the server again


@dataclass(frozen=True)
class Started:
    """A running server: what it serves and where."""

    model: ModelFolder
    chat: bool
    settings: Settings
    info: ServerInfo
    grpc_address: str
    http_address: str


async def run_server(
    path: Path, settings: Settings, on_start: Callable[[Started], None], stop: asyncio.Event | None = None
) -> None:
    """Serve the model folder at `path` until SIGTERM or SIGINT, or until `stop` is set where one is given.

    Raises:
        NotFoundError: there is no model folder.
        InputError: the folder cannot be used or a port cannot be bound.
        EngineEndedError: the engine ended by a defect or with its GPU; a server without one is of no use.
    """
    config = replace(settings.server, max_connections=allowed_connections(settings.server.max_connections))
    check_can_listen(config.host, config.grpc_port, "--grpc-port")
    check_can_listen(config.host, config.http_port, "--http-port")
    own_process = stop is None
    stop = stop or _signal(config.grace_seconds)
    tls = None if config.tls is None else Tls(config.tls)
    tokens = tokens_of(config)
    metrics = Metrics(settings.metrics.metric_aliases)
    async with run_model(path, settings, metrics) as running:
        if stop.is_set():
            return
        grpc_server = GrpcServer(running.service, running.info, config, tls, tokens)
        app = make_app(running, metrics, config.max_message_bytes, tokens)
        http_server = HttpServer(app, config, config.http_port, tls)
        await grpc_server.start()
        await http_server.start()
        try:
            on_start(
                Started(
                    running.model,
                    running.template is not None,
                    settings,
                    running.info,
                    join(config.host, grpc_server.port),
                    join(config.host, http_server.port),
                )
            )
            stopping = asyncio.create_task(stop.wait())
            either: set[asyncio.Future[Any]] = {stopping, asyncio.wrap_future(running.engine.ended)}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if own_process and not stopping.done():
                _exit_after(config.grace_seconds + EXIT_SECONDS, ENGINE_ENDED)
            await grpc_server.announce_end()
            await running.service.drain(config.grace_seconds)
        finally:  # also where the start cannot be printed
            await asyncio.gather(grpc_server.stop(), http_server.stop())
        if not stopping.done():
            raise EngineEndedError("the engine has ended; the log says why")


def _signal(grace_seconds: float) -> asyncio.Event:
    """An event that SIGTERM and SIGINT set. From then on the process has `grace_seconds` and a few more to end."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if not event.is_set():
            event.set()
            _exit_after(grace_seconds + EXIT_SECONDS, EXIT_CODE)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    return event


def _exit_after(seconds: float, code: int) -> None:
    timer = threading.Timer(seconds, _exit, (code,))
    timer.daemon = True
    timer.start()


def _exit(code: int) -> None:
    """End the process: a step or a thread that does not return cannot be stopped in any other way."""
    text = f"Error: something still ran {EXIT_SECONDS:g} s after the grace period; the process ends\n"
    poll = select.poll()
    poll.register(STDERR, select.POLLOUT)
    if poll.poll(0):  # not print, nor logging: who waits for stderr may hold their locks
        with suppress(OSError):
            os.write(STDERR, text.encode())
    os._exit(code)
