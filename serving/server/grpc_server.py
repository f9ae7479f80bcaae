"""The gRPC server: the services of Sharp and KServe, health and reflection on one port."""

import asyncio
from collections.abc import Awaitable, Callable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health
from grpc_reflection.v1alpha import reflection, reflection_pb2
from grpc_reflection.v1alpha._async import ReflectionServicer

from sharp.kserve import grpc_service_pb2, grpc_service_pb2_grpc
from sharp.serving.api.errors import InputError
from sharp.serving.config import ServerConfig
from sharp.serving.frontends.admission import most_request_bytes
from sharp.serving.frontends.grpc.authentication import TokenInterceptor
from sharp.serving.frontends.grpc.control import ControlService
from sharp.serving.frontends.grpc.inference import InferenceService
from sharp.serving.frontends.grpc.kserve import KServeService
from sharp.serving.frontends.grpc.limits import LimitInterceptor
from sharp.serving.frontends.grpc.messages import MessageInterceptor
from sharp.serving.frontends.grpc.refusals import RefusalInterceptor
from sharp.serving.frontends.grpc.status import Context
from sharp.serving.frontends.running import ServerInfo
from sharp.serving.frontends.service import GenerationService
from sharp.serving.observability.refusals import Refusals
from sharp.serving.security.address import join
from sharp.serving.security.tls import Tls
from sharp.serving.security.tokens import Tokens
from sharp.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc

SERVICES = (
    inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name,
    control_pb2.DESCRIPTOR.services_by_name["ControlService"].full_name,
    grpc_service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name,
)

REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"
NAMES = (*SERVICES, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)

LAST_MESSAGES_SECONDS = 3
HEALTH_SECONDS = 1.0
# Pings keep an idle connection alive through proxies, and find out when its client has gone. Clients may ping every
# 10 s; gRPC's own default would cut them off for pinging that often.
KEEPALIVE = (
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
)


class _Health(health.HealthServicer):  # type: ignore[misc]
    """A health service that responds with what a request would meet now; watchers hear of a change in `HEALTH_SECONDS`.

    A status from before the event loop was busy for a while does not count, because the engine may have ended
    meanwhile.
    """

    def __init__(self, update: Callable[[], Awaitable[None]]) -> None:
        super().__init__()
        self._update = update

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        """Update the status, and return it."""
        await self._update()
        return await super().Check(request, context)


def reflection_v1() -> grpc.GenericRpcHandler:
    """Return reflection under its newer name, with the same messages, because newer tools ask for that name first."""
    servicer = ReflectionServicer((*NAMES, REFLECTION_V1))
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(REFLECTION_V1, {"ServerReflectionInfo": method})


class GrpcServer:
    """A gRPC server of one model; lives in one event loop."""

    def __init__(
        self,
        service: GenerationService,
        info: ServerInfo,
        config: ServerConfig,
        tls: Tls | None = None,
        tokens: Tokens | None = None,
        refusals: Refusals | None = None,
    ) -> None:
        """Bind the port. Without `tls` it is plain text; without `tokens` or `refusals` nothing is checked or counted.

        Raises:
            InputError: the address cannot be bound.
        """
        self._service = service
        self._serving: bool | None = None
        self._watch: asyncio.Task[None] | None = None
        self._server = grpc.aio.server(
            interceptors=(
                *(() if refusals is None else (RefusalInterceptor(refusals),)),
                *(() if tokens is None else (TokenInterceptor(tokens),)),
                LimitInterceptor(service, config.max_message_bytes, config.body_seconds),
                MessageInterceptor(),
            ),
            options=(
                ("grpc.max_receive_message_length", most_request_bytes(service.model, config.max_message_bytes)),
                ("grpc.max_send_message_length", config.max_message_bytes),
                # Otherwise a second server on the same port would take a share of the connections, unnoticed.
                ("grpc.so_reuseport", 0),
                *KEEPALIVE,
                ("grpc.max_concurrent_streams", config.max_streams),
                ("grpc.max_allowed_incoming_connections", config.max_connections),
                ("grpc.max_connection_idle_ms", round(config.idle_seconds * 1000)),
                ("grpc.server_handshake_timeout_ms", round(config.header_seconds * 1000)),
            ),
        )
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(  # type: ignore[no-untyped-call]
            InferenceService(service), self._server
        )
        control_pb2_grpc.add_ControlServiceServicer_to_server(  # type: ignore[no-untyped-call]
            ControlService(service, info), self._server
        )
        grpc_service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(  # type: ignore[no-untyped-call]
            KServeService(service, info.version), self._server
        )
        self._health = _Health(self._update_health)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            NAMES,
            self._server,
        )
        self._server.add_generic_rpc_handlers((reflection_v1(),))
        address = join(config.host, config.grpc_port)
        try:
            self.port = (
                self._server.add_insecure_port(address)
                if tls is None
                else self._server.add_secure_port(address, tls.grpc_credentials())
            )
        except RuntimeError as error:
            raise InputError(f"cannot listen on {address}; choose another --grpc-port") from error

    async def start(self) -> None:
        """Begin to serve, and set health to SERVING if the service is ready, else to NOT_SERVING.

        From then on health is updated every second (`HEALTH_SECONDS`), until `announce_end`.
        """
        await self._server.start()
        await self._update_health()
        self._watch = asyncio.create_task(self._watch_health())

    async def _watch_health(self) -> None:
        """Update the status of gRPC's health protocol every `HEALTH_SECONDS`."""
        while True:
            await asyncio.sleep(HEALTH_SECONDS)
            await self._update_health()

    async def _update_health(self) -> None:
        """Set the status of health to what a request would meet now."""
        serving = await self._service.health.ready()
        if serving != self._serving:
            status = health_pb2.HealthCheckResponse
            for service in ("", *SERVICES):
                await self._health.set(service, status.SERVING if serving else status.NOT_SERVING)
            self._serving = serving  # set last: if this is cancelled before, the next update sends the status

    async def announce_end(self) -> None:
        """Set health to NOT_SERVING for good, and stop updating it. Call before `stop`."""
        if self._watch is not None:
            self._watch.cancel()
        await self._health.enter_graceful_shutdown()

    async def stop(self) -> None:
        """End the server; calls that still run have 3 s for their last messages before they are cancelled.

        Call `announce_end` before, which ends the task that updates health.
        """
        await self._server.stop(LAST_MESSAGES_SECONDS)
