"""`ModelServer`: one replica, with an engine for each model that it holds."""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import Receive, Scope, Send

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.grpc_util import RayServegRPCContext
from sharp.core.manifest import read_manifest
from sharp.ray.backpressure import MessageBatch, held_back, missing_settings
from sharp.ray.context import ReplicaContext, Servicer
from sharp.ray.request import model_of
from sharp.ray.router import PrefixRouter
from sharp.serving.api.errors import FieldError, InputError, NotFoundError, SharpError
from sharp.serving.frontends.grpc.control import MISSING_REQUEST_ID, ControlService
from sharp.serving.frontends.grpc.inference import InferenceService
from sharp.serving.frontends.grpc.kserve import KServeService
from sharp.serving.frontends.grpc.status import abort, reports_errors
from sharp.serving.frontends.http.app import make_app, metrics_route
from sharp.serving.frontends.http.authentication import TokenMiddleware, is_protected
from sharp.serving.frontends.http.errors import error_response
from sharp.serving.frontends.http.server import HttpServer
from sharp.serving.frontends.running import RunningModel, run_model
from sharp.serving.observability.metrics import Metrics
from sharp.serving.observability.request_log import set_up_logging
from sharp.serving.security import caller
from sharp.serving.security.tokens import tokens_of
from sharp.serving.server.settings_sources import read_settings
from sharp.v1 import control_pb2

logger = logging.getLogger(__name__)
ABORT_SECONDS = 10.0
HIGHEST_PORT = 65535


class ReplicaModel:
    """A loaded model in a replica of Ray Serve, with its engine and HTTP application, until Serve unloads it."""

    def __init__(
        self, running: RunningModel, app: Starlette, stack: AsyncExitStack, grace_seconds: float, models: Sequence[str]
    ) -> None:
        self.running = running
        self.app = app
        self.inference = InferenceService(running.service)
        self.control = ControlService(running.service, running.info)
        self.kserve = KServeService(running.service, running.info.version, models)
        self._stack = stack
        self._grace_seconds = grace_seconds
        # Serve awaits `__del__` of a model that it unloads. It is no method, because Python would call that, too.
        self.__del__ = self.close

    async def close(self) -> None:
        """Wait at most the setting `grace_seconds` for the running requests, cancel the rest, and free the memory."""
        await self.running.service.drain(self._grace_seconds)
        await self._stack.aclose()


def _unary(method: Callable[[ReplicaModel], Servicer]) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Return a method of `ModelServer` for an RPC with one response.

    `method` returns the servicer of a loaded model; the request names the model.
    """

    async def respond(self: "ModelServer", request: Any, grpc_context: RayServegRPCContext) -> Any:
        """Call the RPC of the model that the request names."""
        return await ReplicaContext(grpc_context).unary(partial(self._respond, method), request)

    return respond


@serve.deployment(
    max_ongoing_requests=256,
    max_queued_requests=1024,
    autoscaling_config=AutoscalingConfig(min_replicas=1, max_replicas=8, target_ongoing_requests=32),
    request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),  # type: ignore[arg-type]
    graceful_shutdown_timeout_s=60,
    graceful_shutdown_wait_loop_s=0.5,
    health_check_period_s=5,
)
@serve.ingress()
class ModelServer:
    """Sharp's gRPC services and HTTP application in the form that Serve calls: gRPC's methods by their names."""

    async def __init__(  # type: ignore[misc]
        self, models: list[str], settings: dict[str, Any], models_per_replica: int, metrics_port: int | None
    ) -> None:
        """Take the fields of `sharp.ray.application.Arguments`, and load the first model.

        Raises:
            SharpError: a model or a setting cannot be used.
        """
        self._loaded: set[ReplicaModel] = set()
        self._metrics_server: HttpServer | None = None
        given = ray.get_runtime_context().get_assigned_resources().get("CPU", 1)  # type: ignore[no-untyped-call]
        self._settings = read_settings({"threads": max(1, int(given))} | settings, None)
        config = self._settings.server
        set_up_logging(config.log_format)
        if missing := missing_settings(os.environ):
            logger.warning("what clients do not read is not bounded: start Ray with %s", missing)
        self._folders = {read_manifest(Path(path)).name: Path(path) for path in models}
        if len(self._folders) < len(models):
            raise InputError("two of the models have the same name; give each a name of its own")
        self._tokens = tokens_of(config)
        self._metrics = Metrics(self._settings.metrics.metric_aliases)

        @serve.multiplexed(max_num_models_per_replica=models_per_replica)  # type: ignore[untyped-decorator]
        async def load(name: str) -> ReplicaModel:
            """Load the model of this name."""
            return await self._load_folder(self._folders[name])

        self._load = load
        await self._model("")
        if metrics_port is not None:
            app = Starlette(routes=[metrics_route(self._metrics)])
            # Replicas of one machine cannot share a port.
            gpus = ray.get_runtime_context().get_accelerator_ids()["GPU"]
            index = int(gpus[0]) if gpus and gpus[0].isdecimal() else 0  # 0 if CUDA_VISIBLE_DEVICES has a name
            port = metrics_port + index if metrics_port else 0
            if port > HIGHEST_PORT:
                raise InputError(
                    f"metrics_port is {metrics_port}, but GPU {index} would need {port}; choose a lower one"
                )
            self._metrics_server = HttpServer(app, config, port, name="metrics_port")
            await self._metrics_server.start()
            logger.info("metrics: http://%s:%d/metrics", config.host, self._metrics_server.port)

    async def _load_folder(self, path: Path) -> ReplicaModel:
        """Start the model of an exported folder and register it as loaded, until its exit stack closes."""
        stack = AsyncExitStack()
        config = self._settings.server
        running = await stack.enter_async_context(run_model(path, self._settings, self._metrics))
        app = make_app(running, self._metrics, config.max_message_bytes, self._tokens)
        loaded = ReplicaModel(running, app, stack, config.grace_seconds, tuple(self._folders))
        self._loaded.add(loaded)
        stack.callback(self._loaded.discard, loaded)
        return loaded

    async def _model(self, name: str) -> ReplicaModel:
        """Return the model of that name, or the first model for an empty name, and load it if need be.

        Raises:
            NotFoundError: there is no such model.
            SharpError: the model cannot be loaded.
        """
        name = name or next(iter(self._folders))
        if name not in self._folders:
            raise NotFoundError(f"model {name!r} is not served here; the cluster has {', '.join(self._folders)}")
        loaded: ReplicaModel = await self._load(name)
        return loaded

    async def _whichever(self) -> ReplicaModel:
        """Return any model that is loaded, for a request about none; load the first only if none is loaded."""
        there = [loaded for loaded in self._loaded if not loaded.running.service.draining]
        return there[0] if there else await self._model("")

    async def check_health(self) -> None:
        """Check that the engine of every loaded model works. Serve calls this method every 5 s.

        Serve replaces the replica if the check fails.

        Raises:
            EngineError: an engine has ended, or its last steps and a request of the check's own failed.
            StalledError: an engine or a pool of its threads is stuck.
        """
        for loaded in self._loaded:
            if not loaded.running.service.draining:
                await loaded.running.service.health.check_live()

    async def _respond(self, method: Callable[[ReplicaModel], Servicer], request: Any, context: Any) -> Any:
        """Check the token, choose the model that the request names, and call that model's RPC.

        `method` returns the model's RPC, a function (request, context). SharpError aborts the call with its gRPC
        status.
        """
        try:
            if self._tokens is not None:
                caller.CURRENT_TOKEN.set(self._tokens.check(dict(context.invocation_metadata()).get("authorization")))
            name = model_of(request)
            loaded = await (self._whichever() if name is None else self._model(name))
        except SharpError as error:
            return await abort(context, error)
        return await method(loaded)(request, context)

    def _stream(
        self, method: Callable[[ReplicaModel], Servicer], request: Any, context: Any
    ) -> AsyncGenerator[MessageBatch]:
        """Yield the messages of a streaming RPC in batches.

        `method` returns the RPC of the model that serves the request.
        """
        return ReplicaContext(context).stream(partial(self._respond, method), request)

    async def Generate(self, request: Any, grpc_context: RayServegRPCContext) -> AsyncIterator[MessageBatch]:  # noqa: N802
        """Yield the responses of `sharp.v1.InferenceService.Generate` in batches."""
        async with aclosing(self._stream(lambda loaded: loaded.inference.Generate, request, grpc_context)) as batches:
            async for batch in batches:
                yield batch

    # Serve calls these methods by name. RPCs about a server are about the replica that handles the request.
    Tokenize = _unary(lambda loaded: loaded.inference.Tokenize)
    GetServerInfo = _unary(lambda loaded: loaded.control.GetServerInfo)
    GetModelInfo = _unary(lambda loaded: loaded.control.GetModelInfo)
    GetLoad = _unary(lambda loaded: loaded.control.GetLoad)
    ServerLive = _unary(lambda loaded: loaded.kserve.ServerLive)
    ServerReady = _unary(lambda loaded: loaded.kserve.ServerReady)
    ServerMetadata = _unary(lambda loaded: loaded.kserve.ServerMetadata)
    RepositoryIndex = _unary(lambda loaded: loaded.kserve.RepositoryIndex)
    ModelReady = _unary(lambda loaded: loaded.kserve.ModelReady)
    ModelMetadata = _unary(lambda loaded: loaded.kserve.ModelMetadata)
    ModelConfig = _unary(lambda loaded: loaded.kserve.ModelConfig)
    ModelStatistics = _unary(lambda loaded: loaded.kserve.ModelStatistics)
    ModelInfer = _unary(lambda loaded: loaded.kserve.ModelInfer)

    async def Abort(self, request: Any, grpc_context: RayServegRPCContext) -> Any:  # noqa: N802
        """End a request as `sharp.v1.ControlService` does, in whichever replica it runs."""
        return await ReplicaContext(grpc_context).unary(self._abort, request)

    async def ModelStreamInfer(self, request: Any, grpc_context: RayServegRPCContext) -> AsyncIterator[MessageBatch]:  # noqa: N802
        """Yield the responses to one request of a stream; `sharp.ray.proxy` sends a stream's requests one by one."""
        async with aclosing(self._stream(_alone, request, grpc_context)) as batches:
            async for batch in batches:
                yield batch

    @reports_errors
    async def _abort(self, request: control_pb2.AbortRequest, context: Any) -> Any:
        """End a request by its id on whichever replica runs it.

        Raises:
            FieldError: the request has no id.
            NotFoundError: no replica runs a request of this id.
        """
        if self._tokens is not None:
            self._tokens.check(dict(context.invocation_metadata()).get("authorization"))
        if not request.request_id:
            raise FieldError("request_id", MISSING_REQUEST_ID)
        own = serve.get_replica_context()
        replicas = serve.get_deployment_handle(own.deployment, own.app_name).broadcast("end", request.request_id)
        ended = await replicas.results_async(timeout_s=ABORT_SECONDS, return_exceptions=True)
        if True not in ended:
            raise NotFoundError(f"request_id {request.request_id!r} does not run in this cluster")
        return control_pb2.AbortResponse()

    async def end(self, request_id: str) -> bool:
        """End the request of this id if it runs in this replica, and return whether it did.

        `Abort` calls this method in every replica.
        """
        for loaded in [*self._loaded]:
            with suppress(NotFoundError):
                await asyncio.wrap_future(loaded.running.service.engine.abort(request_id))
                return True
        return False

    def __serve_build_asgi_app__(self) -> Starlette:
        """Return the application to which Serve sends HTTP requests."""
        return Starlette(routes=[Mount("/", self._http)])

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve an ASGI call by the app of the model that it names, after the check of the token if tokens are set."""
        # Check tokens first, so that a client without one makes no replica load a model.
        app = self._of_model if self._tokens is None else TokenMiddleware(self._of_model, self._tokens)
        await app(scope, receive, held_back(send))

    async def _of_model(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to the model that it names; requests for health and metrics go to any loaded model."""
        try:
            if is_protected(scope):
                loaded = await self._model(serve.get_multiplexed_model_id())
            else:
                loaded = await self._whichever()
        except SharpError as error:
            await error_response(error, scope)(scope, receive, send)
        else:
            await loaded.app(scope, receive, send)

    async def __del__(self) -> None:
        """Stop the server of the metrics, and free the models, whose requests Serve has drained."""
        if self._metrics_server is not None:
            await self._metrics_server.stop()
        for loaded in [*self._loaded]:
            await loaded.close()


def _alone(loaded: ReplicaModel) -> Servicer:
    """Return a servicer that passes one request to `ModelStreamInfer`, as a stream with this request only."""

    async def requests(request: Any) -> AsyncIterator[Any]:
        """Yield the one request, as a stream."""
        yield request

    return lambda request, context: loaded.kserve.ModelStreamInfer(requests(request), context)
