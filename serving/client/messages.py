"""Conversion of requests to messages of `sharp.v1`, and of messages to events."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from sharp.serving.api.attention import AttentionSummary
from sharp.serving.api.errors import InputError
from sharp.serving.api.events import (
    Delta,
    Event,
    Finished,
    FinishReason,
    PromptComputed,
    Timing,
    TokenLogprobs,
    Usage,
)
from sharp.serving.api.request import GenerateRequest
from sharp.serving.api.sampling_params import NotGiven, SamplingParams
from sharp.v1 import inference_pb2

REASONS = {
    inference_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    inference_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    inference_pb2.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
    inference_pb2.FINISH_REASON_TIME_LIMIT: FinishReason.TIME_LIMIT,
}
SEVERAL_PROMPTS = "prompt must be one text or a list of token ids; call generate once for each of several prompts"
STATISTICS = ("entropy_nats", "normalized_entropy", "support_ratio", "inverse_temperature", "logit_spread")


def request_message(request: GenerateRequest) -> inference_pb2.GenerateRequest:
    """Return the message of a request.

    The message has no field for `attention_per_token`, `special_tokens` and the truncation of the prompt, so these are
    left out.

    Raises:
        InputError: the prompt is several prompts, or something does not fit into a message, such as a text that is not
            valid Unicode.
    """
    prompt, params = request.prompt, request.params
    try:
        message = inference_pb2.GenerateRequest(
            request_id=request.request_id,
            model=request.model,
            sampling=_filled(inference_pb2.Sampling(logit_bias=dict(params.logit_bias)), params, {"logit_bias"}),
            stopping=_filled(inference_pb2.Stopping(), params),
            response=_filled(
                inference_pb2.ResponseOptions(attention_stats=request.attention), params, {"attention_stats"}
            ),
            priority=request.priority,
            cache_salt=request.cache_salt,
        )
        if isinstance(prompt, str):
            message.text = prompt
        else:
            message.token_ids.ids.extend(_one(prompt))
            message.token_ids.SetInParent()
        if params.guided is not None:
            message.guided.CopyFrom(inference_pb2.Guided(**{params.guided.kind: params.guided.text}))
    except InputError:
        raise
    except (TypeError, ValueError, UnicodeError) as error:
        raise InputError(f"the request cannot be written as a message: {error}") from error
    return message


def _one(prompt: Iterable[int]) -> list[int]:
    """Return the token ids as a list. InputError if they are several prompts."""
    token_ids = list(prompt)
    if any(isinstance(token_id, Sequence) for token_id in token_ids):
        raise InputError(SEVERAL_PROMPTS)
    return token_ids


def _filled(message: Any, params: SamplingParams, done: Iterable[str] = ()) -> Any:
    """Set each field of a protobuf message from the parameter of that name; skip None, NotGiven and names in `done`."""
    for field in message.DESCRIPTOR.fields:
        value = None if field.name in done else getattr(params, field.name)
        if isinstance(value, tuple):
            getattr(message, field.name).extend(value)
        elif value is not None and not isinstance(value, NotGiven):
            setattr(message, field.name, value)
    return message


def event_of(response: inference_pb2.GenerateResponse, request_id: str) -> Event:
    """Return the event for a message of a response stream; `request_id` is the id of the request."""
    if response.HasField("prompt_info"):
        info = response.prompt_info
        return PromptComputed(request_id, info.cached_tokens, logprobs=_logprobs(info.prompt_logprobs) or None)
    if response.HasField("delta"):
        delta = response.delta
        return Delta(request_id, delta.text, tuple(delta.token_ids), delta.index, _logprobs(delta.logprobs) or None)
    return _finished(response.finished, request_id)


def _finished(message: inference_pb2.Finished, request_id: str) -> Finished:
    """Return the event for a protobuf message about the end of a sequence."""
    matched = message.WhichOneof("matched")
    timing = message.timing
    return Finished(
        request_id,
        REASONS[message.reason],
        None if matched is None else getattr(message, matched),
        Usage(message.usage.prompt_tokens, message.usage.completion_tokens, message.usage.cached_tokens),
        Timing(
            timing.queue_seconds if timing.HasField("queue_seconds") else None,
            timing.time_to_first_token_seconds if timing.HasField("time_to_first_token_seconds") else None,
            timing.total_seconds,
        ),
        _attention(message.attention_stats) if message.HasField("attention_stats") else None,
        message.index,
        message.last,
    )


def _attention(message: inference_pb2.AttentionStats) -> AttentionSummary:
    """Return the attention statistics of a message; sink mass only if the model has sinks."""
    names = STATISTICS if not message.layers or not message.layers[0].sink_mass else (*STATISTICS, "sink_mass")
    return AttentionSummary(
        message.tokens, *(np.array([getattr(layer, name) for layer in message.layers]) for name in names)
    )


def _logprobs(entries: Iterable[inference_pb2.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    """Return the log-probabilities of protobuf messages, one per token."""
    return tuple(
        TokenLogprobs(entry.token_id, entry.logprob, tuple((top.token_id, top.logprob) for top in entry.top))
        for entry in entries
    )
