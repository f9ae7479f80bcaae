"""`TextInference`: a prompt in, a completion out, with the tensor names of Triton's vLLM backend."""

from collections.abc import AsyncGenerator

from sharp.kserve import grpc_service_pb2 as messages
from sharp.serving.api.errors import FieldError
from sharp.serving.api.events import Delta, Finished
from sharp.serving.api.request import GenerateRequest
from sharp.serving.frontends.kserve.inference import FINAL, TensorKind
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
from sharp.serving.observability.request_record import RequestOrigin


class TextInference:
    """See `Inference`."""

    inputs = tuple(TensorKind(name, kind, optional=name != TEXT_INPUT) for name, kind in INPUT_TYPES.items())
    outputs = tuple(TensorKind(name, kind) for name, kind in OUTPUT_TYPES.items())
    decoupled = True

    def __init__(self, service: GenerationService, statistics: Statistics) -> None:
        self._service = service
        self._name = service.model.manifest.name
        self._statistics = statistics

    def read(self, request: messages.ModelInferRequest, *, streams: bool) -> InferenceRequest:
        """See `Inference`."""
        inference = read_request(request, self._service.fields)
        if inference.stream and not streams:
            raise FieldError(STREAM, "stream is true; only ModelStreamInfer can stream")
        return inference

    async def whole(
        self, request_id: str, request: InferenceRequest, origin: RequestOrigin
    ) -> messages.ModelInferResponse:
        """See `Inference`."""
        text = [str(request.generate.prompt)] if request.echo else []
        async with self._service.stream(origin, lambda: self._prepare(request)) as events:
            outputs = Outputs(len(events.request.prompt_ids))
            async for event in events:
                if isinstance(event, Delta):
                    outputs.add(event)
                    text.append(event.text)
                elif isinstance(event, Finished):
                    return self._last(request_id, request, outputs, "".join(text), event)
        raise RuntimeError("the engine lost a request")

    async def responses(
        self, request_id: str, request: InferenceRequest, origin: RequestOrigin
    ) -> AsyncGenerator[messages.ModelInferResponse, None]:
        """See `Inference`; one with all of it if the request asks for no stream."""
        if not request.stream:
            whole = await self.whole(request_id, request, origin)
            whole.parameters[FINAL].bool_param = True
            yield whole
            return
        async with self._service.stream(origin, lambda: self._prepare(request)) as events:
            outputs = Outputs(len(events.request.prompt_ids))
            async for event in events:
                if isinstance(event, Delta):
                    outputs.add(event)
                    if event.text:
                        yield response(self._name, request_id, outputs.tensors(request.outputs, event.text, None))
                elif isinstance(event, Finished):
                    yield self._last(request_id, request, outputs, "", event)

    def _last(
        self, request_id: str, request: InferenceRequest, outputs: Outputs, text: str, finished: Finished
    ) -> messages.ModelInferResponse:
        self._statistics.add(finished)
        last = response(self._name, request_id, outputs.tensors(request.outputs, text, finished.reason))
        last.parameters[FINISH_REASON].string_param = str(finished.reason)
        if request.stream:
            last.parameters[FINAL].bool_param = True
        return last

    def _prepare(self, request: InferenceRequest) -> GenerateRequest:
        # With an id of its own: the client's need not be unique.
        try:
            return self._service.model.prepare(request.generate)
        except FieldError as error:
            raise request.fields.renamed(error) from error
