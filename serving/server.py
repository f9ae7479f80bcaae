"""A whole server: engine, gRPC, HTTP and metrics, from start to stop."""

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sharp.serving.address import check_can_listen, join
from sharp.serving.chat_template import load_chat_template
from sharp.serving.config import BackendConfig, EngineConfig, MetricsConfig, ServerConfig
from sharp.serving.engine.report import EngineReport
from sharp.serving.engine.thread import EngineThread
from sharp.serving.errors import EngineError
from sharp.serving.grpc.server import GrpcServer
from sharp.serving.http.app import make_app
from sharp.serving.http.live import LiveState
from sharp.serving.http.server import HttpServer
from sharp.serving.metrics import Metrics
from sharp.serving.model_folder import ModelFolder, load_model_folder
from sharp.serving.service import GenerationService
from sharp.serving.tls import Tls
from sharp.serving.tokens import Tokens
from sharp.serving.tracing import otlp_tracing
from sharp.v1 import control_pb2


@dataclass(frozen=True)
class Settings:
    """All settings of a server."""

    server: ServerConfig
    engine: EngineConfig
    metrics: MetricsConfig
    backend: BackendConfig


@dataclass(frozen=True)
class Started:
    """A server that answers: what it serves and where."""

    model: ModelFolder
    chat: bool
    settings: Settings
    info: control_pb2.GetServerInfoResponse
    grpc_address: str
    http_address: str


async def run_server(
    path: Path, settings: Settings, on_start: Callable[[Started], None], stop: asyncio.Event | None = None
) -> None:
    """Serve the model folder at `path` until SIGTERM or SIGINT, or until `stop` is set where one is given.

    Raises:
        NotFoundError: there is no model folder.
        InputError: the folder cannot be used or a port cannot be bound.
        EngineError: the engine ended by a defect of its own; a server without one is of no use.
    """
    config = settings.server
    check_can_listen(config.host, config.grpc_port, "--grpc-port")
    check_can_listen(config.host, config.http_port, "--http-port")
    stop = stop or _signal()
    tls = None if config.tls is None else Tls(config.tls)
    tokens = None if config.token_file is None else Tokens(config.token_file)
    endpoint = config.otlp_traces_endpoint
    tracing = None if endpoint is None else otlp_tracing(endpoint, sharp_version())
    template = load_chat_template(path)
    # In a thread, or a signal would find nobody to hear it.
    engine_config = settings.engine
    if settings.metrics.attention_metrics == "off":
        engine_config = replace(engine_config, attention_interval=0)
    model, backend, engine = await asyncio.to_thread(load_model_folder, path, settings.backend, engine_config)
    if stop.is_set():
        return
    info = control_pb2.GetServerInfoResponse(
        version=sharp_version(),
        models=[model.manifest.name],
        backend=f"{settings.backend.name} ({backend.device})" if backend.device != "cpu" else settings.backend.name,
        kernels=backend.kernels,
        threads=settings.backend.threads,
        cache_tokens=model.cache_tokens,
        block_size=model.manifest.cache.block_size,
        max_batch_tokens=settings.engine.max_batch_tokens,
        max_sequences=settings.engine.max_sequences,
        prefill_chunk_tokens=settings.engine.prefill_chunk_tokens,
        prefix_cache=settings.engine.prefix_cache,
        max_waiting_requests=settings.engine.max_waiting_requests,
        max_waiting_tokens=settings.engine.max_waiting_tokens,
    )
    metrics = Metrics()
    model_metrics = metrics.add_model(model.manifest, settings.metrics)

    def observe(report: EngineReport) -> None:
        model_metrics.observe(report)
        service.observe(report)

    thread = EngineThread(engine, observe)
    model_metrics.watch_step(lambda: thread.seconds_in_step)
    service = GenerationService(
        model, thread, config.max_unread_messages, config.stall_seconds, tracing, config.log_prompts
    )
    grpc_server = GrpcServer(service, info, config, tls, tokens)
    live = LiveState(model, metrics, model_metrics)
    app = make_app(service, template, metrics, live, config.max_message_bytes, tokens)
    http_server = HttpServer(app, config.host, config.http_port, tls)
    thread.start()
    try:
        await grpc_server.start()
        await http_server.start()
        on_start(
            Started(
                model,
                template is not None,
                settings,
                info,
                join(config.host, grpc_server.port),
                join(config.host, http_server.port),
            )
        )
        stopping = asyncio.create_task(stop.wait())
        either: set[asyncio.Future[Any]] = {stopping, asyncio.wrap_future(thread.ended)}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        await grpc_server.announce_end()
        await service.drain(config.grace_seconds)
        await asyncio.gather(grpc_server.stop(), http_server.stop())
        if not stopping.done():
            raise EngineError("the engine has ended; the log says why")
    finally:
        # Not in the event loop: the last step may take a while, and its events are delivered to this loop.
        await asyncio.to_thread(thread.stop)
        model_metrics.close()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)


def _signal() -> asyncio.Event:
    """An event that SIGTERM and SIGINT set."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, event.set)
    return event


def sharp_version() -> str:
    """The version of the installed package."""
    try:
        return version("sharp-attention")
    except PackageNotFoundError:  # run from a source tree
        return "0+unknown"
