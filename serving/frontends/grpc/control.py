"""`ControlService`: the description of the server and its model, the load, and Abort."""

import asyncio
from dataclasses import asdict

from sharp.serving.api.errors import FieldError
from sharp.serving.frontends.grpc.convert import model_message
from sharp.serving.frontends.grpc.status import Context, reports_errors
from sharp.serving.frontends.running import ServerInfo
from sharp.serving.frontends.service import GenerationService
from sharp.v1 import control_pb2, control_pb2_grpc

MISSING_REQUEST_ID = "request_id is not set; it is in the metadata and in the first message of Generate"


class ControlService(control_pb2_grpc.ControlServiceServicer):
    """RPCs that read the configuration and the engine's last report, and Abort, which goes to the engine."""

    def __init__(self, service: GenerationService, info: ServerInfo) -> None:
        self._service = service
        self._info = control_pb2.GetServerInfoResponse(**asdict(info))

    @reports_errors
    async def GetServerInfo(  # noqa: N802
        self, _request: control_pb2.GetServerInfoRequest, _context: Context
    ) -> control_pb2.GetServerInfoResponse:
        """Return the server's version, backend, limits and the names of its models."""
        return self._info

    @reports_errors
    async def GetModelInfo(  # noqa: N802
        self, request: control_pb2.GetModelInfoRequest, _context: Context
    ) -> control_pb2.GetModelInfoResponse:
        """Return the description of the model that the request names (empty: the served one): sizes, norm, limits."""
        self._service.check_model(request.model)
        return model_message(self._service.model)

    @reports_errors
    async def GetLoad(  # noqa: N802
        self, _request: control_pb2.GetLoadRequest, _context: Context
    ) -> control_pb2.GetLoadResponse:
        """Return how busy the engine was after its last step."""
        load = self._service.load
        return control_pb2.GetLoadResponse(
            requests_running=load.running if load else 0,
            requests_waiting=load.waiting if load else 0,
            cache_usage_ratio=load.cache_usage if load else 0,
            draining=self._service.draining,
        )

    @reports_errors
    async def Abort(  # noqa: N802
        self, request: control_pb2.AbortRequest, _context: Context
    ) -> control_pb2.AbortResponse:
        """End the running request whose id the message names.

        The call ends with NOT_FOUND if no such request runs, and with INVALID_ARGUMENT without an id.
        """
        if not request.request_id:
            raise FieldError("request_id", MISSING_REQUEST_ID)
        await asyncio.wrap_future(self._service.engine.abort(request.request_id))
        return control_pb2.AbortResponse()
