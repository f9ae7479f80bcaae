"""Events that the engine reports about its requests. Each event names its request."""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from sharp.serving.api.attention import AttentionSummary, TokenEntropies
from sharp.serving.api.errors import SharpError


class FinishReason(StrEnum):
    """The reason why a completion ended."""

    STOP = "stop"
    LENGTH = "length"
    TIME_LIMIT = "time_limit"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class Usage:
    """The token counts of one completion.

    Attributes:
        prompt_tokens: tokens of the prompt, which all completions of a request share.
        completion_tokens: generated tokens.
        cached_tokens: tokens of the prompt that the prefix cache had, so that they were not computed for this request.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True)
class Timing:
    """Durations in seconds since the request arrived at the engine; None for a moment that was not reached.

    Attributes:
        queue: until the first step of the completion.
        time_to_first_token: until the first token of the completion.
        total: until the end of the completion.
    """

    queue: float | None
    time_to_first_token: float | None
    total: float


@dataclass(frozen=True)
class Accepted:
    """The request is queued and waits for its first step."""

    request_id: str
    prompt_tokens: int


@dataclass(frozen=True)
class TokenLogprobs:
    """The logprobs (natural logarithms of probabilities) at one position of a text, from the model's own logits.

    Attributes:
        token_id: the token at the position.
        logprob: the logprob of that token.
        top: pairs (token id, logprob) of the most likely tokens, best first, as many as requested.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class PromptChunk:
    """The part of a prompt that was computed in one step. Times are in seconds of `time.perf_counter`."""

    tokens: int
    began: float
    ended: float


@dataclass(frozen=True)
class PromptComputed:
    """The prompt is computed. This event comes once, before the first Delta.

    Attributes:
        request_id: the request.
        cached_tokens: tokens of the prompt that the prefix cache had.
        chunks: the chunks in which the other tokens were computed.
        logprobs: one entry per token of the prompt after the first, if requested. The first token has none.
    """

    request_id: str
    cached_tokens: int
    chunks: tuple[PromptChunk, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True)
class Delta:
    """New tokens of one completion, and the text that is now final.

    Attributes:
        request_id: the request.
        text: whole characters that cannot be part of a stop string; often empty.
        token_ids: the new tokens.
        index: the number of the completion among the request's `n`.
        logprobs: one entry per token, if requested.
        attention: the entropies of the queries whose logits the tokens were sampled from, if requested.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    index: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None
    attention: TokenEntropies | None = None


@dataclass(frozen=True)
class Finished:
    """One completion is finished. A request of `n` completions has `n` of these events.

    Attributes:
        request_id: the request.
        reason: the reason why the completion ended.
        matched: the stop string or stop token that ended it; None if none did.
        usage: the token counts of the completion.
        timing: seconds since the request arrived.
        attention: means over the computed tokens of prompt and completion, if requested.
        index: the number of the completion among the request's `n`.
        last: all completions of the request are finished, so no event follows.
    """

    request_id: str
    reason: FinishReason
    matched: str | int | None
    usage: Usage
    timing: Timing
    attention: AttentionSummary | None
    index: int = 0
    last: bool = True


@dataclass(frozen=True, eq=False)
class ComputedRows:
    """The output of a model without a cache for a request's rows. This event comes once, before Finished.

    Attributes:
        request_id: the request.
        values: float32 [rows, ...]. For the texts of an encoder: embeddings before normalization [texts, size], or
            logits [texts, labels]. For other models: the model's output.
    """

    request_id: str
    values: NDArray[np.float32]


@dataclass(frozen=True)
class Failed:
    """The request was refused, or failed with all its completions. No event follows."""

    request_id: str
    error: SharpError


Event = Accepted | PromptComputed | Delta | ComputedRows | Finished | Failed
