"""What the engine says of its requests; each event names the request it is about."""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from sharp.serving.api.attention import AttentionSummary, TokenEntropies
from sharp.serving.api.errors import SharpError


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    LENGTH = "length"
    TIME_LIMIT = "time_limit"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class Usage:
    """Tokens of one completion.

    Attributes:
        prompt_tokens: tokens of the prompt; all completions of a request share them.
        completion_tokens: generated tokens.
        cached_tokens: tokens of the prompt that the prefix cache had, so they were not computed for this request.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True)
class Timing:
    """Seconds since the request arrived; None for what never happened."""

    queue: float | None
    time_to_first_token: float | None
    total: float


@dataclass(frozen=True)
class Accepted:
    """The request waits for its first step."""

    request_id: str
    prompt_tokens: int


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of probabilities at one position of a text, from the model's own logits.

    Attributes:
        token_id: the token that stands there.
        logprob: its own.
        top: (token id, logarithm) of the most likely tokens, best first, as many as requested.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class PromptChunk:
    """Tokens of a prompt that were computed in one step; times in seconds of `time.perf_counter`."""

    tokens: int
    began: float
    ended: float


@dataclass(frozen=True)
class PromptComputed:
    """The prompt is computed; comes once, before the first Delta.

    Attributes:
        request_id: the request.
        cached_tokens: tokens of the prompt that the prefix cache had.
        chunks: the steps that computed the others.
        logprobs: one entry per token of the prompt after the first, if requested. Nothing predicts the first.
    """

    request_id: str
    cached_tokens: int
    chunks: tuple[PromptChunk, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True)
class Delta:
    """Generated tokens of one completion, and the text that became certain.

    Attributes:
        request_id: the request.
        text: whole characters that cannot be part of a stop string; often empty.
        token_ids: the tokens.
        index: which of the request's `n` completions.
        logprobs: one entry per token, if requested.
        attention: the entropies of the queries that the tokens were sampled after, if requested.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    index: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None
    attention: TokenEntropies | None = None


@dataclass(frozen=True)
class Finished:
    """One completion is finished; a request of `n` completions has `n` of these.

    Attributes:
        request_id: the request.
        reason: why it ended.
        matched: the stop string or stop token that ended it.
        usage: its tokens.
        timing: seconds since the request arrived.
        attention: means over the computed tokens of prompt and completion, if requested.
        index: which of the request's `n` completions.
        last: no other completion of the request is still to come; nothing follows.
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
    """What a model without a cache made of a request's rows; comes once, before Finished.

    Attributes:
        request_id: the request.
        values: float32 [rows, ...]: of an encoder's texts [texts, size], embeddings before they are normalized, or
            [texts, labels], logits; else the model's output.
    """

    request_id: str
    values: NDArray[np.float32]


@dataclass(frozen=True)
class Failed:
    """The request was refused, or the engine lost it with all its completions; nothing follows."""

    request_id: str
    error: SharpError


Event = Accepted | PromptComputed | Delta | ComputedRows | Finished | Failed
