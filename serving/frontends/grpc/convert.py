"""Conversion of `sharp.v1` messages to requests, and of events to messages."""

from typing import Any, cast

from google.protobuf.message import Message

from sharp.core.manifest import NormValue
from sharp.serving.api.attention import AttentionSummary
from sharp.serving.api.errors import FieldError
from sharp.serving.api.events import Delta, Finished, FinishReason, PromptComputed, TokenLogprobs
from sharp.serving.api.guided import Guided
from sharp.serving.api.request import GenerateRequest, Prompt
from sharp.serving.api.sampling_params import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_SAMPLES,
    MAX_STOP_STRINGS,
    SamplingParams,
)
from sharp.serving.engine.served_model import ServedModel
from sharp.v1 import control_pb2, inference_pb2

MAX_REQUEST_ID = 256  # characters
REASONS = {
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: inference_pb2.FINISH_REASON_CANCELLED,
    FinishReason.TIME_LIMIT: inference_pb2.FINISH_REASON_TIME_LIMIT,
}

# The path in the message GenerateRequest of each field of `SamplingParams`, where the field has only its own name.
PATHS = {
    field.name: f"{part}.{field.name}"
    for part, message in (
        ("sampling", inference_pb2.Sampling),
        ("stopping", inference_pb2.Stopping),
        ("response", inference_pb2.ResponseOptions),
    )
    for field in message.DESCRIPTOR.fields
}


def generate_request(message: inference_pb2.GenerateRequest) -> GenerateRequest:
    """Return the request of a message; fields that the message does not set keep their defaults.

    Raises:
        FieldError: the message has no prompt, or a value is out of range.
    """
    if len(message.request_id) > MAX_REQUEST_ID:
        text = f"request_id has {len(message.request_id)} characters; the limit is {MAX_REQUEST_ID}"
        raise FieldError("request_id", text)
    return GenerateRequest(
        _prompt(message),
        _sampling_params(message),
        request_id=message.request_id,
        attention=message.response.attention_stats,
        priority=message.priority,
        cache_salt=message.cache_salt,
    )


def _prompt(message: inference_pb2.GenerateRequest) -> Prompt:
    """Return the text or the token ids of a request. FieldError if neither is set."""
    kind = message.WhichOneof("prompt")
    if kind == "text":
        return message.text
    if kind == "token_ids":
        return message.token_ids.ids  # not copied, because the length is not checked yet
    raise FieldError("prompt", "prompt is not set; set text or token_ids")


def _sampling_params(message: inference_pb2.GenerateRequest) -> SamplingParams:
    """Return the sampling parameters that are set in a request; others have their defaults."""
    given = {**_set_fields(message.sampling), **_set_fields(message.stopping), **_set_fields(message.response)}
    given.pop("attention_stats", None)
    guided = Guided(**_set_fields(message.guided)) if message.HasField("guided") else None
    return SamplingParams(**given, guided=guided)


def _set_fields(message: Message) -> dict[str, Any]:
    """Return the fields of a message that are set, and those without presence, which are empty if not set."""
    return {
        field.name: getattr(message, field.name)
        for field in message.DESCRIPTOR.fields
        if not field.has_presence or message.HasField(field.name)
    }


def prompt_info(
    request: GenerateRequest, model: str, computed: PromptComputed | None
) -> inference_pb2.GenerateResponse:
    """Return the first message of a stream; `computed` is None if the request ended before its prompt was read."""
    info = inference_pb2.PromptInfo(
        request_id=request.request_id,
        model=model,
        prompt_tokens=len(request.prompt_ids),
        cached_tokens=computed.cached_tokens if computed else None,
        prompt_logprobs=_logprobs(computed.logprobs if computed else None),
    )
    return inference_pb2.GenerateResponse(prompt_info=info)


def delta_message(delta: Delta) -> inference_pb2.GenerateResponse:
    """Return the `sharp.v1` message of new tokens of a stream, with text, ids and logprobs."""
    message = inference_pb2.TokenDelta(
        text=delta.text, token_ids=delta.token_ids, index=delta.index, logprobs=_logprobs(delta.logprobs)
    )
    return inference_pb2.GenerateResponse(delta=message)


def _logprobs(entries: tuple[TokenLogprobs, ...] | None) -> list[inference_pb2.TokenLogprobs]:
    """Return log-probabilities as protobuf messages; empty for None."""
    return [
        inference_pb2.TokenLogprobs(
            token_id=entry.token_id,
            logprob=entry.logprob,
            top=[inference_pb2.TokenLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in entry.top],
        )
        for entry in entries or ()
    ]


def finished_message(finished: Finished) -> inference_pb2.GenerateResponse:
    """Return the protobuf message that ends a sequence: the reason, usage, times and attention."""
    message = inference_pb2.Finished(
        reason=REASONS[finished.reason],
        usage=inference_pb2.Usage(
            prompt_tokens=finished.usage.prompt_tokens,
            completion_tokens=finished.usage.completion_tokens,
            cached_tokens=finished.usage.cached_tokens,
        ),
        timing=inference_pb2.Timing(
            queue_seconds=finished.timing.queue,
            time_to_first_token_seconds=finished.timing.time_to_first_token,
            total_seconds=finished.timing.total,
        ),
        attention_stats=attention_message(finished.attention) if finished.attention else None,
        index=finished.index,
        last=finished.last,
    )
    if isinstance(finished.matched, str):
        message.stop_string = finished.matched
    elif finished.matched is not None:
        message.stop_token_id = finished.matched
    return inference_pb2.GenerateResponse(finished=message)


def attention_message(summary: AttentionSummary) -> inference_pb2.AttentionStats:
    """Return the attention statistics of a request as a protobuf message, one entry per layer."""
    return inference_pb2.AttentionStats(
        tokens=summary.tokens,
        layers=[
            inference_pb2.LayerAttentionStats(
                entropy_nats=summary.entropy[layer],
                normalized_entropy=summary.normalized_entropy[layer],
                support_ratio=summary.support_ratio[layer],
                inverse_temperature=summary.inverse_temperature[layer],
                logit_spread=summary.logit_spread[layer],
                sink_mass=() if summary.sink_mass is None else summary.sink_mass[layer],
            )
            for layer in range(len(summary.entropy))
        ],
    )


def model_message(model: ServedModel) -> control_pb2.GetModelInfoResponse:
    """Return the `sharp.v1` description of a model: its norm, sizes, limits, and the requests that it accepts."""
    manifest, generator = model.manifest, model.abilities.generator
    norm, text = manifest.norm, manifest.tokenizer.file is not None
    return control_pb2.GetModelInfoResponse(
        name=manifest.name,
        source=manifest.source.name,
        architecture=manifest.source.architecture,
        norm=control_pb2.Norm(
            name=norm.name,
            normalizer=norm.normalizer,
            trained=norm.trained,
            alpha=norm.alpha if norm.normalizer == "entmax" else None,
            parameters=[
                control_pb2.NormParameter(name=parameter.name, values=_values(parameter.value), origin=parameter.origin)
                for parameter in norm.parameters
            ],
        ),
        layers=manifest.layers,
        q_heads=manifest.q_heads,
        kv_heads=manifest.kv_heads,
        head_dim=manifest.head_dim,
        value_dim=manifest.value_dim,
        vocab_size=manifest.vocab_size,
        max_context=model.context_limit,
        trained_context=manifest.trained_context,
        positions=manifest.positions,
        tokenizer=text,
        eos_token_ids=manifest.tokenizer.eos_token_ids,
        accepts=control_pb2.Accepts(
            text=text,
            guided=generator is not None and generator.guides.available,
            n=MAX_SAMPLES,
            logprobs=MAX_LOGPROBS,
            stop_strings=MAX_STOP_STRINGS if text else 0,
            logit_bias=MAX_LOGIT_BIAS,
        ),
        sampling=inference_pb2.Sampling(**cast("Any", generator.sampling if generator else {})),
    )


def _values(value: NormValue) -> tuple[float, ...]:
    """Return a norm's parameter as a tuple: empty for None, of one number, or of one per head."""
    if value is None:
        return ()
    return value if isinstance(value, tuple) else (value,)
