"""`KServeModel`: what KServe's protocol says of a model and asks of it, over gRPC and over HTTP."""

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from sharp.kserve import grpc_service_pb2 as messages
from sharp.serving.api.errors import SERVER_FAILED, FieldError, NotFoundError, SharpError
from sharp.serving.api.events import Delta, Finished
from sharp.serving.api.request import GenerateRequest
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


class KServeModel:
    """A model as KServe's protocol sees it: its tensors, its statistics, and inference."""

    def __init__(self, service: GenerationService, models: Sequence[str] = ()) -> None:
        """`models` are the names of all that the cluster serves, where it serves more than that of `service`."""
        self._service = service
        self.name = service.model.manifest.name
        self._models = models or (self.name,)
        self._statistics = Statistics()

    def metadata(self) -> messages.ModelMetadataResponse:
        """The tensors of the model."""
        tensor = messages.ModelMetadataResponse.TensorMetadata
        return messages.ModelMetadataResponse(
            name=self.name,
            versions=[VERSION],
            platform="sharp",
            inputs=[tensor(name=name, datatype=datatype, shape=[1]) for name, datatype in INPUT_TYPES.items()],
            outputs=[tensor(name=name, datatype=datatype, shape=[1]) for name, datatype in OUTPUT_TYPES.items()],
        )

    def configuration(self) -> messages.ModelConfigResponse:
        """The tensors of the model, and that a request may have several responses."""
        config = messages.ModelConfig(
            name=self.name,
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

    def statistics(self) -> messages.ModelStatisticsResponse:
        """How many requests came by this protocol, and how long they took."""
        return messages.ModelStatisticsResponse(model_stats=[self._statistics.message(self.name, VERSION)])

    def repository(self) -> messages.RepositoryIndexResponse:
        """The models that there are; one that is not loaded is loaded by the first request for it."""
        index = messages.RepositoryIndexResponse.ModelIndex
        return messages.RepositoryIndexResponse(
            models=[index(name=name, version=VERSION, state="READY") for name in self._models]
        )

    async def infer(self, request: messages.ModelInferRequest, origin: RequestOrigin) -> messages.ModelInferResponse:
        """Generate, and respond with the whole text."""
        with self._statistics.measured():
            with refusals_logged(origin, self.name):
                inference = await self._service.parsing.run(lambda: self._read(request))
                if inference.stream:
                    raise FieldError(STREAM, "stream is true; only ModelStreamInfer can stream")
            return await self._whole(request.id, inference, origin)

    async def stream_responses(
        self, request: messages.ModelInferRequest, origin: RequestOrigin
    ) -> AsyncGenerator[messages.ModelStreamInferResponse, None]:
        """The messages of a stream for one request, its error included."""
        try:
            with self._statistics.measured():
                async with aclosing(self.responses(request, origin)) as responses:
                    async for one in responses:
                        yield messages.ModelStreamInferResponse(infer_response=one)
        except Exception as error:
            if not isinstance(error, SharpError):
                logger.exception("a request of ModelStreamInfer failed")
            yield stream_error(request, str(error) if isinstance(error, SharpError) else SERVER_FAILED, self.name)

    async def responses(
        self, request: messages.ModelInferRequest, origin: RequestOrigin
    ) -> AsyncGenerator[messages.ModelInferResponse, None]:
        """Generate, and respond with the text as it comes, or with all of it if the request asks for no stream."""
        with refusals_logged(origin, self.name):
            inference = await self._service.parsing.run(lambda: self._read(request))
        if not inference.stream:
            whole = await self._whole(request.id, inference, origin)
            whole.parameters[FINAL].bool_param = True
            yield whole
            return
        async with self._service.stream(origin, lambda: self._prepare(inference)) as events:
            outputs = Outputs(len(events.request.prompt_ids))
            async for event in events:
                if isinstance(event, Delta):
                    outputs.add(event)
                    if event.text:
                        yield response(self.name, request.id, outputs.tensors(inference.outputs, event.text, None))
                elif isinstance(event, Finished):
                    yield self._last(request.id, inference, outputs, "", event)

    async def _whole(
        self, request_id: str, inference: InferenceRequest, origin: RequestOrigin
    ) -> messages.ModelInferResponse:
        text = [str(inference.generate.prompt)] if inference.echo else []
        async with self._service.stream(origin, lambda: self._prepare(inference)) as events:
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
        last = response(self.name, request_id, outputs.tensors(inference.outputs, text, finished.reason))
        last.parameters[FINISH_REASON].string_param = str(finished.reason)
        if inference.stream:
            last.parameters[FINAL].bool_param = True
        return last

    def _prepare(self, inference: InferenceRequest) -> GenerateRequest:
        # With an id of its own: the client's need not be unique.
        return self._service.model.prepare(inference.generate)

    def _read(self, request: messages.ModelInferRequest) -> InferenceRequest:
        self.check(request.model_name, request.model_version)
        return read_request(request)

    def check(self, name: str, version: str) -> None:
        """Raise NotFoundError unless the model is served in this version."""
        self._service.check_model(name)
        if version not in ("", VERSION):
            raise NotFoundError(f"model {name!r} has no version {version!r}; it has version {VERSION!r}")


def stream_error(request: messages.ModelInferRequest, message: str, model: str) -> messages.ModelStreamInferResponse:
    """The response of a stream to a request that failed."""
    failed = messages.ModelInferResponse(model_name=model, id=request.id)
    return messages.ModelStreamInferResponse(error_message=message, infer_response=failed)
