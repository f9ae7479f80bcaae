"""`GRPCInferenceService`: Triton's clients, unchanged."""

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from functools import partial

from sharp.kserve import grpc_service_pb2 as messages
from sharp.kserve import grpc_service_pb2_grpc
from sharp.serving.api.errors import SERVER_FAILED, FieldError, NotFoundError, SharpError
from sharp.serving.api.events import Delta, Finished
from sharp.serving.api.request import GenerateRequest
from sharp.serving.frontends.kserve.concurrency import respond_concurrently
from sharp.serving.frontends.kserve.inference_request import InferenceRequest, read_request
from sharp.serving.frontends.kserve.outputs import Outputs
from sharp.serving.frontends.kserve.statistics import Statistics
from sharp.serving.frontends.kserve.tensors import (
    FINISH_REASON,
    INPUT_TYPES,
    OUTPUT_TYPES,
    STREAM,
    TEXT_INPUT,
    response,
)
from sharp.serving.frontends.rpc.status import Context, origin_of, reports_errors, write
from sharp.serving.frontends.service import GenerationService
from sharp.serving.observability.request_log import refusals_logged
from sharp.serving.observability.request_record import RequestOrigin

logger = logging.getLogger(__name__)

VERSION = "1"
CONFIG_TYPES = {
    "BYTES": messages.TYPE_STRING,
    "BOOL": messages.TYPE_BOOL,
    "FP32": messages.TYPE_FP32,
    "UINT32": messages.TYPE_UINT32,
}
FINAL = "triton_final_response"


class KServeService(grpc_service_pb2_grpc.GRPCInferenceServiceServicer):
    """KServe's RPCs over one `GenerationService`."""

    def __init__(self, service: GenerationService, version: str, models: Sequence[str] = ()) -> None:
        """`models` are the names of all that the cluster serves, where it serves more than that of `service`."""
        self._service = service
        self._version = version
        self._model = service.model.manifest.name
        self._models = models or (self._model,)
        self._statistics = Statistics()

    @property
    def model(self) -> str:
        """The name of the model."""
        return self._model

    @reports_errors
    async def ServerLive(  # noqa: N802
        self, _request: messages.ServerLiveRequest, _context: Context
    ) -> messages.ServerLiveResponse:
        """The server needs no restart."""
        return messages.ServerLiveResponse(live=await self._service.health.live())

    @reports_errors
    async def ServerReady(  # noqa: N802
        self, _request: messages.ServerReadyRequest, _context: Context
    ) -> messages.ServerReadyResponse:
        """The server takes requests."""
        return messages.ServerReadyResponse(ready=await self._service.health.ready())

    @reports_errors
    async def ModelReady(  # noqa: N802
        self, request: messages.ModelReadyRequest, _context: Context
    ) -> messages.ModelReadyResponse:
        """The model takes requests."""
        self.check_model(request.name, request.version)
        return messages.ModelReadyResponse(ready=await self._service.health.ready())

    @reports_errors
    async def ServerMetadata(  # noqa: N802
        self, _request: messages.ServerMetadataRequest, _context: Context
    ) -> messages.ServerMetadataResponse:
        """What the server is."""
        return messages.ServerMetadataResponse(name="sharp", version=self._version)

    @reports_errors
    async def ModelMetadata(  # noqa: N802
        self, request: messages.ModelMetadataRequest, _context: Context
    ) -> messages.ModelMetadataResponse:
        """The tensors of the model."""
        self.check_model(request.name, request.version)
        return self.metadata()

    def metadata(self) -> messages.ModelMetadataResponse:
        """The tensors of the model."""
        tensor = messages.ModelMetadataResponse.TensorMetadata
        return messages.ModelMetadataResponse(
            name=self._model,
            versions=[VERSION],
            platform="sharp",
            inputs=[tensor(name=name, datatype=datatype, shape=[1]) for name, datatype in INPUT_TYPES.items()],
            outputs=[tensor(name=name, datatype=datatype, shape=[1]) for name, datatype in OUTPUT_TYPES.items()],
        )

    @reports_errors
    async def ModelConfig(  # noqa: N802
        self, request: messages.ModelConfigRequest, _context: Context
    ) -> messages.ModelConfigResponse:
        """The tensors of the model, and that a request may have several responses."""
        self.check_model(request.name, request.version)
        return self.configuration()

    def configuration(self) -> messages.ModelConfigResponse:
        """The tensors of the model, and that a request may have several responses."""
        config = messages.ModelConfig(
            name=self._model,
            platform="sharp",
            backend="sharp",
            input=[
                messages.ModelInput(name=name, data_type=CONFIG_TYPES[kind], dims=[1], optional=name != TEXT_INPUT)
                for name, kind in INPUT_TYPES.items()
            ],
            output=[
                messages.ModelOutput(name=name, data_type=CONFIG_TYPES[kind], dims=[1])
                for name, kind in OUTPUT_TYPES.items()
            ],
            model_transaction_policy=messages.ModelTransactionPolicy(decoupled=True),
        )
        return messages.ModelConfigResponse(config=config)

    @reports_errors
    async def ModelStatistics(  # noqa: N802
        self, request: messages.ModelStatisticsRequest, _context: Context
    ) -> messages.ModelStatisticsResponse:
        """How many requests came by this protocol, and how long they took."""
        self.check_model(request.name, request.version)
        return self.statistics()

    def statistics(self) -> messages.ModelStatisticsResponse:
        """How many requests came by this protocol, and how long they took."""
        return messages.ModelStatisticsResponse(model_stats=[self._statistics.message(self._model, VERSION)])

    @reports_errors
    async def RepositoryIndex(  # noqa: N802
        self, request: messages.RepositoryIndexRequest, _context: Context
    ) -> messages.RepositoryIndexResponse:
        """The models that there are."""
        return self.repository() if request.repository_name == "" else messages.RepositoryIndexResponse()

    def repository(self) -> messages.RepositoryIndexResponse:
        """The models that there are; one that is not loaded is loaded by the first request for it."""
        index = messages.RepositoryIndexResponse.ModelIndex
        return messages.RepositoryIndexResponse(
            models=[index(name=name, version=VERSION, state="READY") for name in self._models]
        )

    @reports_errors
    async def ModelInfer(  # noqa: N802
        self, request: messages.ModelInferRequest, context: Context
    ) -> messages.ModelInferResponse:
        """Generate, and respond with the whole text."""
        return await self.infer(request, origin_of(context, "kserve"))

    async def infer(self, request: messages.ModelInferRequest, call: RequestOrigin) -> messages.ModelInferResponse:
        """Generate, and respond with the whole text."""
        with self._statistics.measured():
            with refusals_logged(call, self._model):
                inference = await self._service.parsing.run(lambda: self._read(request))
                if inference.stream:
                    raise FieldError(STREAM, "stream is true; only ModelStreamInfer can stream")
            return await self._whole(request.id, inference, call)

    @reports_errors
    async def ModelStreamInfer(  # noqa: N802
        self, requests: AsyncIterator[messages.ModelInferRequest], context: Context
    ) -> None:
        """Generate for each request of the stream; an error is that of its request and ends no other."""
        call = origin_of(context, "kserve")
        await respond_concurrently(
            requests, lambda request: self._stream_responses(request, call), partial(write, context)
        )

    async def _stream_responses(
        self, request: messages.ModelInferRequest, call: RequestOrigin
    ) -> AsyncGenerator[messages.ModelStreamInferResponse, None]:
        """The messages of a stream for one request, its error included."""
        try:
            with self._statistics.measured():
                async with aclosing(self.responses(request, call)) as responses:
                    async for one in responses:
                        yield messages.ModelStreamInferResponse(infer_response=one)
        except Exception as error:
            if not isinstance(error, SharpError):
                logger.exception("a request of ModelStreamInfer failed")
            yield stream_error(request, str(error) if isinstance(error, SharpError) else SERVER_FAILED, self._model)

    async def responses(
        self, request: messages.ModelInferRequest, call: RequestOrigin
    ) -> AsyncGenerator[messages.ModelInferResponse, None]:
        """Generate, and respond with the text as it comes, or with all of it if the request asks for no stream."""
        with refusals_logged(call, self._model):
            inference = await self._service.parsing.run(lambda: self._read(request))
        if not inference.stream:
            whole = await self._whole(request.id, inference, call)
            whole.parameters[FINAL].bool_param = True
            yield whole
            return
        async with self._service.stream(call, lambda: self._prepare(inference)) as events:
            outputs = Outputs(len(events.request.prompt_ids))
            async for event in events:
                if isinstance(event, Delta):
                    outputs.add(event)
                    if event.text:
                        yield response(self._model, request.id, outputs.tensors(inference.outputs, event.text, None))
                elif isinstance(event, Finished):
                    yield self._last(request.id, inference, outputs, "", event)

    async def _whole(
        self, request_id: str, inference: InferenceRequest, call: RequestOrigin
    ) -> messages.ModelInferResponse:
        text = [str(inference.generate.prompt)] if inference.echo else []
        async with self._service.stream(call, lambda: self._prepare(inference)) as events:
            outputs = Outputs(len(events.request.prompt_ids))
            async for event in events:
                if isinstance(event, Delta):
                    outputs.add(event)
                    text.append(event.text)
                elif isinstance(event, Finished):
                    return self._last(request_id, inference, outputs, "".join(text), event)
        raise RuntimeError("the engine lost a request")

    def _last(
        self, request_id: str, inference: InferenceRequest, outputs: Outputs, text: str, finished: Finished
    ) -> messages.ModelInferResponse:
        self._statistics.add(finished)
        last = response(self._model, request_id, outputs.tensors(inference.outputs, text, finished.reason))
        last.parameters[FINISH_REASON].string_param = str(finished.reason)
        if inference.stream:
            last.parameters[FINAL].bool_param = True
        return last

    def _prepare(self, inference: InferenceRequest) -> GenerateRequest:
        # With an id of its own: the client's need not be unique.
        return self._service.model.prepare(inference.generate)

    def _read(self, request: messages.ModelInferRequest) -> InferenceRequest:
        self.check_model(request.model_name, request.model_version)
        return read_request(request)

    def check_model(self, name: str, version: str) -> None:
        """Raise NotFoundError unless the model is served in this version."""
        self._service.check_model(name)
        if version not in ("", VERSION):
            raise NotFoundError(f"model {name!r} has no version {version!r}; it has version {VERSION!r}")


def stream_error(request: messages.ModelInferRequest, message: str, model: str) -> messages.ModelStreamInferResponse:
    """The response of a stream to a request that failed."""
    failed = messages.ModelInferResponse(model_name=model, id=request.id)
    return messages.ModelStreamInferResponse(error_message=message, infer_response=failed)
