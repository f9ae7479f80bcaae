"""`KServeModel`: the description of a model and its inference in KServe's protocol, over gRPC and HTTP."""

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from sharp.kserve import grpc_service_pb2 as messages
from sharp.serving.api.errors import SERVER_FAILED, NotFoundError, SharpError
from sharp.serving.frontends.kserve.inference import VERSION, Inference, TensorKind
from sharp.serving.frontends.kserve.own_tensors import TensorInference
from sharp.serving.frontends.kserve.statistics import Statistics
from sharp.serving.frontends.kserve.text_inference import TextInference
from sharp.serving.frontends.service import GenerationService
from sharp.serving.observability.refusals import note_reason
from sharp.serving.observability.request_log import refusals_logged
from sharp.serving.observability.request_record import RequestOrigin

logger = logging.getLogger(__name__)

# The status that is counted for a refused request of a stream: the call goes on with other requests and has none yet.
IN_STREAM = "in-stream"

CONFIG_TYPES = {
    "BYTES": messages.TYPE_STRING,
    "BOOL": messages.TYPE_BOOL,
    "FP32": messages.TYPE_FP32,
    "UINT32": messages.TYPE_UINT32,
}


class KServeModel:
    """A model as KServe's protocol sees it: its tensors, its statistics, and inference."""

    def __init__(self, service: GenerationService, models: Sequence[str] = ()) -> None:
        """Describe the model of `service`; `models` are the names of all that the cluster serves, if more."""
        self._service = service
        self.name = service.model.manifest.name
        self._models = models or (self.name,)
        self._statistics = Statistics()
        tensors = service.model.abilities.tensors
        self._inference: Inference = (
            TextInference(service, self._statistics)
            if tensors is None
            else TensorInference(service, tensors, self._statistics)
        )

    def metadata(self) -> messages.ModelMetadataResponse:
        """Return the model's name and version, and the names, datatypes and shapes of its input and output tensors."""

        def described(tensors: Sequence[TensorKind]) -> list[messages.ModelMetadataResponse.TensorMetadata]:
            """Return name, type and shape of tensors as KServe's messages."""
            tensor = messages.ModelMetadataResponse.TensorMetadata
            return [tensor(name=kind.name, datatype=kind.datatype, shape=kind.shape) for kind in tensors]

        return messages.ModelMetadataResponse(
            name=self.name,
            versions=[VERSION],
            platform="sharp",
            inputs=described(self._inference.inputs),
            outputs=described(self._inference.outputs),
        )

    def configuration(self) -> messages.ModelConfigResponse:
        """Return the tensors of the model, and whether a request may have several responses."""
        config = messages.ModelConfig(
            name=self.name,
            platform="sharp",
            backend="sharp",
            input=[
                messages.ModelInput(
                    name=kind.name, data_type=CONFIG_TYPES[kind.datatype], dims=kind.shape, optional=kind.optional
                )
                for kind in self._inference.inputs
            ],
            output=[
                messages.ModelOutput(name=kind.name, data_type=CONFIG_TYPES[kind.datatype], dims=kind.shape)
                for kind in self._inference.outputs
            ],
            model_transaction_policy=messages.ModelTransactionPolicy(decoupled=self._inference.decoupled),
        )
        return messages.ModelConfigResponse(config=config)

    def statistics(self) -> messages.ModelStatisticsResponse:
        """Return the number of requests that came by this protocol, and how long they took."""
        return messages.ModelStatisticsResponse(model_stats=[self._statistics.message(self.name, VERSION)])

    def repository(self) -> messages.RepositoryIndexResponse:
        """Return the names of all served models, each as READY. A model that is not loaded is loaded when requested."""
        index = messages.RepositoryIndexResponse.ModelIndex
        return messages.RepositoryIndexResponse(
            models=[index(name=name, version=VERSION, state="READY") for name in self._models]
        )

    async def infer(self, request: messages.ModelInferRequest, origin: RequestOrigin) -> messages.ModelInferResponse:
        """Run a request, and return its whole response.

        Raises:
            NotFoundError: there is no such model or version.
            FieldError: a tensor or a parameter cannot be used.
            SharpError: the request was refused or failed.
        """
        with self._statistics.measured():
            with refusals_logged(origin, self.name):
                read = await self._service.parsing.run(lambda: self._read(request, streams=False), origin.client)
            return await self._inference.whole(request.id, read, origin)

    async def stream_responses(
        self, request: messages.ModelInferRequest, origin: RequestOrigin
    ) -> AsyncGenerator[messages.ModelStreamInferResponse, None]:
        """Yield the messages of a stream for one request, including that of its error."""
        try:
            async with aclosing(self.responses(request, origin)) as responses:
                async for response in responses:
                    yield messages.ModelStreamInferResponse(infer_response=response)
        except Exception as error:
            if not isinstance(error, SharpError):
                logger.exception("a request of ModelStreamInfer failed")
            elif (current := note_reason(error)) is not None:
                current.refused(IN_STREAM)
            yield stream_error(request, str(error) if isinstance(error, SharpError) else SERVER_FAILED, self.name)

    async def responses(
        self, request: messages.ModelInferRequest, origin: RequestOrigin
    ) -> AsyncGenerator[messages.ModelInferResponse, None]:
        """Run a request and yield its responses as they come, or one whole response if it asks for no stream.

        Raises:
            NotFoundError: there is no such model or version.
            FieldError: a tensor or a parameter cannot be used.
            SharpError: the request was refused or failed.
        """
        with self._statistics.measured():
            with refusals_logged(origin, self.name):
                read = await self._service.parsing.run(lambda: self._read(request, streams=True), origin.client)
            async with aclosing(self._inference.responses(request.id, read, origin)) as responses:
                async for response in responses:
                    yield response

    def _read(self, request: messages.ModelInferRequest, *, streams: bool) -> object:
        """Check model and version, and return the request as the model's inference reads it.

        `streams` says whether the RPC can stream its response.
        """
        self.check(request.model_name, request.model_version)
        return self._inference.read(request, streams=streams)

    def check(self, name: str, version: str) -> None:
        """Raise NotFoundError unless the model `name` is served in this version."""
        self._service.check_model(name)
        if version not in ("", VERSION):
            raise NotFoundError(f"model {name!r} has no version {version!r}; it has version {VERSION!r}")


def stream_error(request: messages.ModelInferRequest, message: str, model: str) -> messages.ModelStreamInferResponse:
    """Return the stream's response to a request that failed, with `message` as the error and the request's id."""
    failed = messages.ModelInferResponse(model_name=model, id=request.id)
    return messages.ModelStreamInferResponse(error_message=message, infer_response=failed)
