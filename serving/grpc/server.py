"""The gRPC server: our services, health and reflection on one port."""

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health
from grpc_reflection.v1alpha import reflection

from sharp.kserve import grpc_service_pb2, grpc_service_pb2_grpc
from sharp.serving.address import join
from sharp.serving.config import ServerConfig
from sharp.serving.errors import InputError
from sharp.serving.grpc.control import ControlService
from sharp.serving.grpc.inference import InferenceService
from sharp.serving.kserve.service import KServeService
from sharp.serving.service import GenerationService
from sharp.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc

SERVICES = (
    inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name,
    control_pb2.DESCRIPTOR.services_by_name["ControlService"].full_name,
    grpc_service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name,
)

LAST_MESSAGES_SECONDS = 0.2


class GrpcServer:
    """Serves one model; lives in one event loop."""

    def __init__(
        self, service: GenerationService, info: control_pb2.GetServerInfoResponse, config: ServerConfig
    ) -> None:
        """Bind the port.

        Raises:
            InputError: the address cannot be bound.
        """
        self._server = grpc.aio.server(
            options=(
                ("grpc.max_receive_message_length", config.max_message_bytes),
                ("grpc.max_send_message_length", config.max_message_bytes),
                # Otherwise a second server would take a share of the first one's connections and nobody would know.
                ("grpc.so_reuseport", 0),
            )
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
        self._health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (*SERVICES, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME),
            self._server,
        )
        address = join(config.host, config.grpc_port)
        try:
            self.port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise InputError(f"cannot listen on {address}; choose another --grpc-port") from error

    async def start(self) -> None:
        """Begin to answer and say so in health."""
        await self._server.start()
        for service in ("", *SERVICES):
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)

    async def announce_end(self) -> None:
        """Say in health that it ends."""
        await self._health.enter_graceful_shutdown()

    async def stop(self) -> None:
        """End, and cancel what still runs after the last messages had a moment to leave."""
        await self._server.stop(LAST_MESSAGES_SECONDS)
