"""`InferenceRequest`: a request of KServe's protocol, from its tensors and parameters."""

import json
from dataclasses import dataclass, replace

from pydantic import ValidationError

from sharp.kserve import grpc_service_pb2 as messages
from sharp.serving.api.errors import FieldError
from sharp.serving.api.request import GenerateRequest
from sharp.serving.api.sampling_fields import SamplingFields, first_error
from sharp.serving.frontends.kserve.inference import TIMEOUT, read_parameters
from sharp.serving.frontends.kserve.tensors import (
    CUMULATIVE_LOGPROB,
    EXCLUDE_INPUT,
    SAMPLING_PARAMETERS,
    STREAM,
    TEXT_INPUT,
    TEXT_OUTPUT,
    read_inputs,
    read_outputs,
)


@dataclass(frozen=True)
class InferenceRequest:
    """A request for one completion.

    Attributes:
        generate: the request to the engine.
        stream: one response per piece of text instead of one for all.
        echo: the text begins with the prompt.
        outputs: the names of the tensors that its responses have.
    """

    generate: GenerateRequest
    stream: bool
    echo: bool
    outputs: frozenset[str]


def read_request(request: messages.ModelInferRequest) -> InferenceRequest:
    """The request of a message.

    Raises:
        FieldError: a tensor or a parameter is missing, unknown, of another type or out of its range.
    """
    inputs = read_inputs(request)
    outputs = read_outputs(request, inputs)
    if TEXT_INPUT not in inputs:
        raise FieldError(TEXT_INPUT, f"input {TEXT_INPUT!r} is missing")
    parameters = read_parameters(request)
    if (microseconds := parameters.pop(TIMEOUT, 0)) and isinstance(microseconds, int):
        parameters["time_limit_ms"] = -(-microseconds // 1000)
    try:
        given = json.loads(str(inputs.get(SAMPLING_PARAMETERS) or "{}"))
        fields = SamplingFields.model_validate({**given, **parameters})
    except ValidationError as error:
        raise first_error(error, SamplingFields.model_fields) from error
    except (ValueError, TypeError, RecursionError) as error:
        message = f"input {SAMPLING_PARAMETERS!r} must be a JSON object: {error}"
        raise FieldError(SAMPLING_PARAMETERS, message) from error
    if fields.n not in (None, 1):
        raise FieldError("n", f"n is {fields.n}; {TEXT_OUTPUT} holds one completion; send several requests")
    stream = bool(inputs.get(STREAM))
    echo = not inputs.get(EXCLUDE_INPUT, stream)  # by default as in Triton's vLLM backend
    if stream and echo:
        raise FieldError(EXCLUDE_INPUT, f"{EXCLUDE_INPUT} is false; a stream has new text only")
    params = fields.params()
    if CUMULATIVE_LOGPROB in outputs:
        params = replace(params, logprobs=0)
    generate = GenerateRequest(str(inputs[TEXT_INPUT]), params, priority=fields.priority, cache_salt=fields.cache_salt)
    return InferenceRequest(generate, stream, echo, outputs)
