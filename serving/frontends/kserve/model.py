"""`KServeModel`: what KServe's protocol says of a model and asks of it, over gRPC and over HTTP."""

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
from sharp.serving.observability.request_log import refusals_logged
from sharp.serving.observability.request_record import RequestOrigin
from sharp.serving.tensors.folder import TensorFolder

logger = logging.getLogger(__name__)

CONFIG_TYPES = {
    "BYTES": messages.TYPE_STRING,
    "BOOL": messages.TYPE_BOOL,
    "FP32": messages.TYPE_FP32,
    "UINT32": messages.TYPE_UINT32,
}


class KServeModel:
    """A model as KServe's protocol sees it: its tensors, its statistics, and inference."""

    def __init__(self, service: GenerationService, models: Sequence[str] = ()) -> None:
        """`models` are the names of all that the cluster serves, where it serves more than that of `service`."""
        self._service = service
        self.name = service.model.manifest.name
        self._models = models or (self.name,)
        self._statistics = Statistics()
        folder = service.model
        self._inference: Inference = (
            TensorInference(service, folder, self._statistics)
            if isinstance(folder, TensorFolder)
            else TextInference(service, self._statistics)
        )

    def metadata(self) -> messages.ModelMetadataResponse:
        """The tensors of the model."""

        def described(tensors: Sequence[TensorKind]) -> list[messages.ModelMetadataResponse.TensorMetadata]:
            tensor = messages.ModelMetadataResponse.TensorMetadata
            return [tensor(name=one.name, datatype=one.datatype, shape=one.shape) for one in tensors]

        return messages.ModelMetadataResponse(
            name=self.name,
            versions=[VERSION],
            platform="sharp",
            inputs=described(self._inference.inputs),
            outputs=described(self._inference.outputs),
        )

    def configuration(self) -> messages.ModelConfigResponse:
        """The tensors of the model, and whether a request may have several responses."""
        config = messages.ModelConfig(
            name=self.name,
            platform="sharp",
            backend="sharp",
            input=[
                messages.ModelInput(
                    name=one.name, data_type=CONFIG_TYPES[one.datatype], dims=one.shape, optional=one.optional
                )
                for one in self._inference.inputs
            ],
            output=[
                messages.ModelOutput(name=one.name, data_type=CONFIG_TYPES[one.datatype], dims=one.shape)
                for one in self._inference.outputs
            ],
            model_transaction_policy=messages.ModelTransactionPolicy(decoupled=self._inference.decoupled),
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
        """Compute, and respond with all of it."""
        with self._statistics.measured():
            with refusals_logged(origin, self.name):
                read = await self._service.parsing.run(lambda: self._read(request, streams=False))
            return await self._inference.whole(request.id, read, origin)

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
        """Compute, and respond as it comes, or with all of it if the request asks for no stream."""
        with refusals_logged(origin, self.name):
            read = await self._service.parsing.run(lambda: self._read(request, streams=True))
        async with aclosing(self._inference.responses(request.id, read, origin)) as responses:
            async for one in responses:
                yield one

    def _read(self, request: messages.ModelInferRequest, *, streams: bool) -> object:
        self.check(request.model_name, request.model_version)
        return self._inference.read(request, streams=streams)

    def check(self, name: str, version: str) -> None:
        """Raise NotFoundError unless the model is served in this version."""
        self._service.check_model(name)
        if version not in ("", VERSION):
            raise NotFoundError(f"model {name!r} has no version {version!r}; it has version {VERSION!r}")


def stream_error(request: messages.ModelInferRequest, message: str, model: str) -> messages.ModelStreamInferResponse:
    """The response of a stream to a request that failed."""
    failed = messages.ModelInferResponse(model_name=model, id=request.id)
    return messages.ModelStreamInferResponse(error_message=message, infer_response=failed)
