"""`InferenceRequest`: a request of KServe's protocol, from its tensors and parameters."""

import json
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ConfigDict

from sharp.kserve import grpc_service_pb2 as messages
from sharp.serving.api.errors import FieldError
from sharp.serving.api.request import GenerateRequest
from sharp.serving.api.sampling_params import SamplingParams
from sharp.serving.frontends.foreign_fields import OF_KSERVE
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
from sharp.serving.frontends.request_fields import RequestFields
from sharp.serving.frontends.structured_outputs import NESTED
from sharp.serving.frontends.unknown_fields import UnknownFields


class InferenceFields(RequestFields):
    """The parameters of a request; numbers and flags may be written as strings, as Triton's clients do."""

    model_config = ConfigDict(strict=False)
    foreign = OF_KSERVE

    def params(self) -> SamplingParams:
        """Return the sampling parameters of one completion.

        Raises:
            FieldError: a field is out of range.
        """
        if self.n not in (None, 1):
            raise FieldError("n", f"n is {self.n}; {TEXT_OUTPUT} holds one completion; send several requests")
        return super().params()


@dataclass(frozen=True)
class InferenceRequest:
    """A request for one completion.

    Attributes:
        generate: the request to the engine.
        fields: the parameters of the request as the client wrote them.
        stream: one response per piece of text instead of one for all.
        echo: the text begins with the prompt.
        outputs: the names of the tensors that the responses have.
    """

    generate: GenerateRequest
    fields: InferenceFields
    stream: bool
    echo: bool
    outputs: frozenset[str]


def read_request(request: messages.ModelInferRequest, unknown: UnknownFields) -> InferenceRequest:
    """Return the request of a message; `unknown` is the policy for parameters that are not known.

    Raises:
        FieldError: a tensor or a parameter is missing, unknown, of another type or out of its range.
    """
    inputs = read_inputs(request)
    outputs = read_outputs(request, inputs)
    if TEXT_INPUT not in inputs:
        raise FieldError(TEXT_INPUT, f"input {TEXT_INPUT!r} is missing; add the prompt as a BYTES tensor of this name")
    parameters = read_parameters(request)
    if (microseconds := parameters.pop(TIMEOUT, 0)) and isinstance(microseconds, int):
        parameters["time_limit_ms"] = -(-microseconds // 1000)
    fields = unknown.parse(InferenceFields, _as_json(inputs.get(SAMPLING_PARAMETERS), parameters))
    stream = bool(inputs.get(STREAM))
    echo = not inputs.get(EXCLUDE_INPUT, stream)  # the default is that of Triton's vLLM backend
    if stream and echo:
        raise FieldError(EXCLUDE_INPUT, f"{EXCLUDE_INPUT} is false; a stream has new text only")
    try:
        params = fields.params()
    except FieldError as error:
        raise fields.renamed(error) from error
    if CUMULATIVE_LOGPROB in outputs:
        params = replace(params, logprobs=0)
    generate = GenerateRequest(
        str(inputs[TEXT_INPUT]),
        params,
        priority=fields.priority,
        cache_salt=fields.cache_salt,
        special_tokens=fields.adds_special_tokens,
        truncate_prompt_tokens=fields.truncate_prompt_tokens,
        truncate_right=fields.truncation_side == "right",
    )
    return InferenceRequest(generate, fields, stream, echo, outputs)


def _as_json(sampling: str | bool | None, parameters: dict[str, Any]) -> bytes:
    """Return the tensor of sampling parameters and the parameters of a message as one JSON object.

    Raises:
        FieldError: the tensor or a parameter is no JSON object.
    """
    field = SAMPLING_PARAMETERS
    try:
        given = {**json.loads(str(sampling or "{}")), **parameters}
        for nested in NESTED:
            if isinstance(text := given.get(nested), str):  # Triton's vLLM backend accepts a text of JSON
                field = nested
                given[nested] = json.loads(text)
        return json.dumps(given).encode()
    except (ValueError, TypeError, RecursionError) as error:
        name = f"input {field!r}" if field == SAMPLING_PARAMETERS else field
        raise FieldError(field, f"{name} must be a JSON object: {error}") from error
