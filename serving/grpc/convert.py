"""Between the messages of `sharp.v1` and the engine's own types."""

from typing import Any

from sharp.plugins.manifest import Manifest
from sharp.serving.attention import AttentionSummary
from sharp.serving.engine.events import Delta, Finished, FinishReason
from sharp.serving.errors import InputError
from sharp.serving.request import Prompt
from sharp.serving.sampling_params import SamplingParams
from sharp.v1 import control_pb2, inference_pb2

REASONS = {
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: inference_pb2.FINISH_REASON_CANCELLED,
}


def prompt_of(request: inference_pb2.GenerateRequest) -> Prompt:
    """The prompt of a request.

    Raises:
        InputError: the request has none.
    """
    kind = request.WhichOneof("prompt")
    if kind == "text":
        return request.text
    if kind == "token_ids":
        return tuple(request.token_ids.ids)
    raise InputError("prompt is not set; set text or token_ids")


def sampling_params_of(request: inference_pb2.GenerateRequest) -> SamplingParams:
    """The sampling parameters of a request; what it does not set keeps its default.

    Raises:
        InputError: a value is out of its range.
    """
    given: dict[str, Any] = {
        field: getattr(message, field)
        for message, fields in (
            (request.sampling, ("temperature", "top_k", "top_p", "seed")),
            (request.stopping, ("max_tokens", "ignore_eos")),
        )
        for field in fields
        if message.HasField(field)
    }
    return SamplingParams(
        stop=tuple(request.stopping.stop), stop_token_ids=tuple(request.stopping.stop_token_ids), **given
    )


def delta_message(delta: Delta) -> inference_pb2.GenerateResponse:
    """A message of generated tokens."""
    return inference_pb2.GenerateResponse(delta=inference_pb2.TokenDelta(text=delta.text, token_ids=delta.token_ids))


def finished_message(finished: Finished) -> inference_pb2.GenerateResponse:
    """The last message of a stream."""
    message = inference_pb2.Finished(
        reason=REASONS[finished.reason],
        usage=inference_pb2.Usage(
            prompt_tokens=finished.usage.prompt_tokens, completion_tokens=finished.usage.completion_tokens
        ),
        timing=inference_pb2.Timing(
            queue_seconds=finished.timing.queue,
            time_to_first_token_seconds=finished.timing.time_to_first_token,
            total_seconds=finished.timing.total,
        ),
        attention_stats=attention_message(finished.attention) if finished.attention else None,
    )
    if isinstance(finished.matched, str):
        message.stop_string = finished.matched
    elif finished.matched is not None:
        message.stop_token_id = finished.matched
    return inference_pb2.GenerateResponse(finished=message)


def attention_message(summary: AttentionSummary) -> inference_pb2.AttentionStats:
    """The attention statistics of a request."""
    return inference_pb2.AttentionStats(
        tokens=summary.tokens,
        layers=[
            inference_pb2.LayerAttentionStats(
                entropy_nats=summary.entropy[layer],
                normalized_entropy=summary.normalized_entropy[layer],
                support_ratio=summary.support_ratio[layer],
                inverse_temperature=summary.inverse_temperature[layer],
                logit_spread=summary.logit_spread[layer],
            )
            for layer in range(len(summary.entropy))
        ],
    )


def model_message(manifest: Manifest, context_limit: int) -> control_pb2.GetModelInfoResponse:
    """What a model is."""
    norm = manifest.norm
    return control_pb2.GetModelInfoResponse(
        name=manifest.name,
        source=manifest.source.name,
        architecture=manifest.source.architecture,
        norm=control_pb2.Norm(
            name=norm.name,
            normalizer=norm.normalizer,
            trained=norm.trained,
            alpha=norm.alpha if norm.normalizer == "entmax" else None,
        ),
        layers=manifest.layers,
        q_heads=manifest.q_heads,
        kv_heads=manifest.kv_heads,
        head_dim=manifest.head_dim,
        value_dim=manifest.value_dim,
        vocab_size=manifest.vocab_size,
        max_context=context_limit,
        trained_context=manifest.trained_context,
        positions=manifest.positions,
        tokenizer=manifest.tokenizer.file is not None,
        eos_token_ids=manifest.tokenizer.eos_token_ids,
    )
