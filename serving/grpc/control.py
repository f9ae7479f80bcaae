"""`ControlService`: what the server is, and Abort."""

import asyncio

from sharp.serving.engine.thread import EngineThread
from sharp.serving.errors import InputError
from sharp.serving.grpc.convert import model_message
from sharp.serving.grpc.inference import check_model
from sharp.serving.grpc.status import Context, reports_errors
from sharp.serving.model_folder import ModelFolder
from sharp.v1 import control_pb2, control_pb2_grpc


class ControlService(control_pb2_grpc.ControlServiceServicer):
    """Answers from what was fixed at start; Abort goes to the engine."""

    def __init__(self, model: ModelFolder, engine: EngineThread, info: control_pb2.GetServerInfoResponse) -> None:
        self._model = model
        self._engine = engine
        self._info = info

    @reports_errors
    async def GetServerInfo(  # noqa: N802
        self, _request: control_pb2.GetServerInfoRequest, _context: Context
    ) -> control_pb2.GetServerInfoResponse:
        """How the server is set up."""
        return self._info

    @reports_errors
    async def GetModelInfo(  # noqa: N802
        self, request: control_pb2.GetModelInfoRequest, _context: Context
    ) -> control_pb2.GetModelInfoResponse:
        """What the model is."""
        check_model(self._model, request.model)
        return model_message(self._model.manifest, self._model.context_limit)

    @reports_errors
    async def Abort(  # noqa: N802
        self, request: control_pb2.AbortRequest, _context: Context
    ) -> control_pb2.AbortResponse:
        """End a running request."""
        if not request.request_id:
            raise InputError("request_id is not set; it is in the first message of Generate")
        await asyncio.wrap_future(self._engine.abort(request.request_id))
        return control_pb2.AbortResponse()
