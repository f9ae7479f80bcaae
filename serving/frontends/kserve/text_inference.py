"""`TextInference`: a prompt in, a completion out, with the tensor names of Triton's vLLM backend."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass

from sharp.kserve import grpc_service_pb2 as messages
from sharp.serving.api.errors import FieldError
from sharp.serving.api.events import Delta, Finished, FinishReason
from sharp.serving.api.request import GenerateRequest
from sharp.serving.frontends.kserve.inference import FINAL, TensorKind
from sharp.serving.frontends.kserve.inference_request import InferenceRequest, read_request
from sharp.serving.frontends.kserve.statistics import Statistics
from sharp.serving.frontends.kserve.tensors import (
    CUMULATIVE_LOGPROB,
    FINISH_REASON,
    INPUT_TYPES,
    NUM_INPUT_TOKENS,
    NUM_OUTPUT_TOKENS,
    OUTPUT_TYPES,
    STREAM,
    TEXT_INPUT,
    TEXT_OUTPUT,
    response,
)
from sharp.serving.frontends.service import GenerationService
from sharp.serving.observability.request_record import RequestOrigin


@dataclass
class OutputTensors:
    """The values of the output tensors of one request that are counted from event to event.

    `logprob` is the log probability of all tokens since the start, `new_tokens` the number of tokens since the last
    response.
    """

    prompt_tokens: int
    logprob: float = 0.0
    new_tokens: int = 0

    def add(self, delta: Delta) -> None:
        """Add the new tokens of a delta and their log probabilities."""
        self.new_tokens += len(delta.token_ids)
        self.logprob += sum(entry.logprob for entry in delta.logprobs or ())

    def tensors(self, requested: frozenset[str], text: str, reason: FinishReason | None) -> dict[str, str | float]:
        """Return the requested tensors of a response with this text, and start a new count of tokens."""
        values: dict[str, str | float] = {
            TEXT_OUTPUT: text,
            FINISH_REASON: str(reason),  # "None" before the end, as Triton's vLLM backend writes it
            CUMULATIVE_LOGPROB: self.logprob,
            NUM_INPUT_TOKENS: self.prompt_tokens,
            NUM_OUTPUT_TOKENS: self.new_tokens,
        }
        self.new_tokens = 0
        return {name: value for name, value in values.items() if name in requested}


class TextInference:
    """The `Inference` of models that generate text."""

    inputs = tuple(TensorKind(name, kind, optional=name != TEXT_INPUT) for name, kind in INPUT_TYPES.items())
    outputs = tuple(TensorKind(name, kind) for name, kind in OUTPUT_TYPES.items())
    decoupled = True

    def __init__(self, service: GenerationService, statistics: Statistics) -> None:
        self._service = service
        self._name = service.model.manifest.name
        self._statistics = statistics

    def read(self, request: messages.ModelInferRequest, *, streams: bool) -> InferenceRequest:
        """Return the request of a message.

        Raises:
            FieldError: a tensor or a parameter cannot be used, or a stream is requested where there is only one
                response.
        """
        inference = read_request(request, self._service.fields)
        if inference.stream and not streams:
            raise FieldError(STREAM, "stream is true; only ModelStreamInfer can stream")
        return inference

    async def whole(
        self, request_id: str, request: InferenceRequest, origin: RequestOrigin
    ) -> messages.ModelInferResponse:
        """Generate, and return one response with the whole completion."""
        text = [str(request.generate.prompt)] if request.echo else []
        async with self._service.stream(origin, lambda: self._prepare(request)) as events:
            outputs = OutputTensors(len(events.request.prompt_ids))
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
        """Generate, and yield pieces of text as they come, or one whole response if the request asks for no stream."""
        if not request.stream:
            whole = await self.whole(request_id, request, origin)
            whole.parameters[FINAL].bool_param = True
            yield whole
            return
        async with self._service.stream(origin, lambda: self._prepare(request)) as events:
            outputs = OutputTensors(len(events.request.prompt_ids))
            async for event in events:
                if isinstance(event, Delta):
                    outputs.add(event)
                    if event.text:
                        yield response(self._name, request_id, outputs.tensors(request.outputs, event.text, None))
                elif isinstance(event, Finished):
                    yield self._last(request_id, request, outputs, "", event)

    def _last(
        self, request_id: str, request: InferenceRequest, outputs: OutputTensors, text: str, finished: Finished
    ) -> messages.ModelInferResponse:
        """Return the last response of an inference, with the rest of the text, and count the request."""
        self._statistics.add(finished)
        last = response(self._name, request_id, outputs.tensors(request.outputs, text, finished.reason))
        last.parameters[FINISH_REASON].string_param = str(finished.reason)
        if request.stream:
            last.parameters[FINAL].bool_param = True
        return last

    def _prepare(self, request: InferenceRequest) -> GenerateRequest:
        """Return the engine's request with an id of its own. FieldError names fields as the client wrote them."""
        # The engine's request gets an id of its own, because the client's id need not be unique.
        try:
            return self._service.model.abilities.require_generator().prepare(request.generate)
        except FieldError as error:
            raise request.fields.renamed(error) from error
