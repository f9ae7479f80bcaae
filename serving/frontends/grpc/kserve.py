"""`GRPCInferenceService`: KServe's protocol over gRPC, which Triton's clients use unchanged."""

from collections.abc import AsyncIterator, Sequence
from functools import partial

from sharp.kserve import grpc_service_pb2 as messages
from sharp.kserve import grpc_service_pb2_grpc
from sharp.serving.frontends.grpc.concurrency import respond_concurrently
from sharp.serving.frontends.grpc.status import Context, origin_of, reports_errors, write
from sharp.serving.frontends.kserve.model import KServeModel
from sharp.serving.frontends.service import GenerationService


class KServeService(grpc_service_pb2_grpc.GRPCInferenceServiceServicer):
    """KServe's RPCs over one `GenerationService`."""

    def __init__(self, service: GenerationService, version: str, models: Sequence[str] = ()) -> None:
        """Serve the model of `service`; `models` are the names of all that the cluster serves, if more."""
        self._health = service.health
        self._version = version
        self._model = KServeModel(service, models)

    @reports_errors
    async def ServerLive(  # noqa: N802
        self, _request: messages.ServerLiveRequest, _context: Context
    ) -> messages.ServerLiveResponse:
        """Return whether the server needs no restart."""
        return messages.ServerLiveResponse(live=await self._health.live())

    @reports_errors
    async def ServerReady(  # noqa: N802
        self, _request: messages.ServerReadyRequest, _context: Context
    ) -> messages.ServerReadyResponse:
        """Return whether the server takes requests."""
        return messages.ServerReadyResponse(ready=await self._health.ready())

    @reports_errors
    async def ModelReady(  # noqa: N802
        self, request: messages.ModelReadyRequest, _context: Context
    ) -> messages.ModelReadyResponse:
        """Return whether the model takes requests."""
        self._model.check(request.name, request.version)
        return messages.ModelReadyResponse(ready=await self._health.ready())

    @reports_errors
    async def ServerMetadata(  # noqa: N802
        self, _request: messages.ServerMetadataRequest, _context: Context
    ) -> messages.ServerMetadataResponse:
        """Return the name and the version of the server."""
        return messages.ServerMetadataResponse(name="sharp", version=self._version)

    @reports_errors
    async def ModelMetadata(  # noqa: N802
        self, request: messages.ModelMetadataRequest, _context: Context
    ) -> messages.ModelMetadataResponse:
        """Return the tensors of the model."""
        self._model.check(request.name, request.version)
        return self._model.metadata()

    @reports_errors
    async def ModelConfig(  # noqa: N802
        self, request: messages.ModelConfigRequest, _context: Context
    ) -> messages.ModelConfigResponse:
        """Return the tensors of the model, and whether a request may have several responses."""
        self._model.check(request.name, request.version)
        return self._model.configuration()

    @reports_errors
    async def ModelStatistics(  # noqa: N802
        self, request: messages.ModelStatisticsRequest, _context: Context
    ) -> messages.ModelStatisticsResponse:
        """Return the number of requests that came by this protocol, and how long they took."""
        self._model.check(request.name, request.version)
        return self._model.statistics()

    @reports_errors
    async def RepositoryIndex(  # noqa: N802
        self, request: messages.RepositoryIndexRequest, _context: Context
    ) -> messages.RepositoryIndexResponse:
        """Return the names of the served models; none for a repository with a name."""
        return self._model.repository() if request.repository_name == "" else messages.RepositoryIndexResponse()

    @reports_errors
    async def ModelInfer(  # noqa: N802
        self, request: messages.ModelInferRequest, context: Context
    ) -> messages.ModelInferResponse:
        """Run a request, and return its whole response."""
        return await self._model.infer(request, origin_of(context, "kserve"))

    @reports_errors
    async def ModelStreamInfer(  # noqa: N802
        self, requests: AsyncIterator[messages.ModelInferRequest], context: Context
    ) -> None:
        """Respond to each request of the stream. An error belongs to one request and ends no other."""
        origin = origin_of(context, "kserve")
        await respond_concurrently(
            requests, lambda request: self._model.stream_responses(request, origin), partial(write, context)
        )
