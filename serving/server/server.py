"""A whole server: engine, gRPC, HTTP and metrics, from start to stop."""

import asyncio
import logging
import os
import resource
import select
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sharp.serving.api.errors import EngineEndedError, InputError
from sharp.serving.config import Settings
from sharp.serving.engine.served_model import ServedModel
from sharp.serving.frontends.http.app import make_app
from sharp.serving.frontends.http.server import HttpServer
from sharp.serving.frontends.running import ServerInfo, run_model
from sharp.serving.observability.metrics import Metrics
from sharp.serving.security.address import check_can_listen, is_loopback, join
from sharp.serving.security.tls import Tls
from sharp.serving.security.tokens import tokens_of
from sharp.serving.server.grpc_server import GrpcServer
from sharp.serving.text.chat_template import ChatTemplate

logger = logging.getLogger(__name__)

EXIT_SECONDS = 3.0  # after the grace period, for cancelled requests to end
EXIT_CODE = 124  # of a process that had to be killed, as in timeout(1)
STDERR = 2
ENGINE_ENDED = 70  # EX_SOFTWARE of sysexits.h: a supervisor should start the server again
RESERVED_FILES = 256  # for files, libraries, other processes and the connections that are just being closed
FEWEST_CONNECTIONS = 8
LEAST_FILES = 64  # that a server opens without any connection; with fewer, gRPC aborts the process


@dataclass(frozen=True)
class Started:
    """A running server: its model, its settings and its addresses.

    `chat` is whether the model has a chat template.
    """

    model: ServedModel
    chat: bool
    settings: Settings
    info: ServerInfo
    grpc_address: str
    http_address: str


async def run_server(
    path: Path, settings: Settings, on_start: Callable[[Started], None], stop: asyncio.Event | None = None
) -> None:
    """Serve the model folder at `path` until SIGTERM, SIGINT or SIGHUP, or, if `stop` is given, until that is set.

    Raises:
        NotFoundError: there is no model folder.
        InputError: the folder or a setting cannot be used, or a port cannot be bound.
        SharpError: software that the backend needs is missing, or (`DeviceLostError`) the GPU is lost.
        EngineEndedError: the engine ended by a defect or with its GPU, without which the server is of no use.
    """
    config = replace(settings.server, max_connections=allowed_connections(settings.server.max_connections))
    check_can_listen(config.host, config.grpc_port, "--grpc-port")
    check_can_listen(config.host, config.http_port, "--http-port")
    own_process = stop is None
    stop = stop or _signal(config.grace_seconds)
    # Read the files in a thread, so that SIGTERM ends the process even if a file system does not respond.
    tls = None if config.tls is None else await asyncio.to_thread(Tls, config.tls)
    tokens = await asyncio.to_thread(tokens_of, config)
    local = is_loopback(config.host)
    authenticated = tokens is not None or (config.tls is not None and config.tls.client_ca is not None)
    if not (local or authenticated):
        logger.warning(
            "whoever reaches %s can use this server, as it asks for no token: set token_file, or tls_client_ca, or "
            "bind 127.0.0.1",
            config.host,
        )
    metrics = Metrics(settings.metrics.metric_aliases)
    async with run_model(path, settings, metrics) as running:
        if stop.is_set():
            return
        grpc_server = GrpcServer(running.service, running.info, config, tls, tokens, running.metrics.refusals)
        app = make_app(running, metrics, config.max_message_bytes, tokens, local_names=local and not authenticated)
        http_server = HttpServer(app, config, config.http_port, tls, refusals=running.metrics.refusals)
        await grpc_server.start()
        await http_server.start()
        try:
            on_start(
                Started(
                    running.model,
                    isinstance(running.template, ChatTemplate),
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
        finally:  # also if `on_start` fails
            await asyncio.gather(grpc_server.stop(), http_server.stop())
        if not stopping.done():
            raise EngineEndedError("the engine has ended; the log says why")


def _signal(grace_seconds: float) -> asyncio.Event:
    """Return an event that SIGTERM, SIGINT and SIGHUP set; the process then has `grace_seconds` and `EXIT_SECONDS`.

    A signal that the process ignores stays ignored, such as SIGHUP under nohup.
    """
    event = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop() -> None:
        """Begin the end of the server at the first signal; the process is ended if that takes too long."""
        if not event.is_set():
            event.set()
            _exit_after(grace_seconds + EXIT_SECONDS, EXIT_CODE)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            loop.add_signal_handler(number, stop)
    return event


def _exit_after(seconds: float, code: int) -> None:
    """End the process with exit code `code` after `seconds`, whatever still runs."""
    timer = threading.Timer(seconds, _exit, (code,))
    timer.daemon = True
    timer.start()


def _exit(code: int) -> None:
    """End the process, because a step or a thread that does not return cannot be stopped in any other way.

    `code` is the exit code.
    """
    text = f"Error: something still ran {EXIT_SECONDS:g} s after the grace period; the process ends\n"
    poll = select.poll()
    poll.register(STDERR, select.POLLOUT)
    if poll.poll(0):  # print and logging have locks, which a thread that waits for stderr may hold
        with suppress(OSError):
            os.write(STDERR, text.encode())
    os._exit(code)


def allowed_connections(most: int, ports: int = 2) -> int:
    """Return the number of connections that each port may have, at most `most`.

    The soft limit of open files is raised for them where the hard limit permits.

    Raises:
        InputError: the limit of open files is too low for any connection.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = RESERVED_FILES + ports * most
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return most
    if soft < LEAST_FILES:
        raise InputError(f"at most {soft} files may be open (ulimit -n); a server needs {LEAST_FILES}, and some more")
    allowed = max(FEWEST_CONNECTIONS, (soft - RESERVED_FILES) // ports)
    logger.warning("max_connections is %d; with at most %d open files (ulimit -n) it is %d", most, soft, allowed)
    return min(most, allowed)
