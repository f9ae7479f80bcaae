"""What the engine says of its requests; each event names the request it is about."""

from dataclasses import dataclass
from enum import StrEnum

from sharp.serving.attention import AttentionSummary
from sharp.serving.errors import SharpError


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class Usage:
    """Tokens of a request; `completion_tokens` are the generated ones."""

    prompt_tokens: int
    completion_tokens: int


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
class Delta:
    """Generated tokens, and the text that became certain."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Finished:
    """The answer is complete; `matched` is the stop string or stop token that ended it."""

    request_id: str
    reason: FinishReason
    matched: str | int | None
    usage: Usage
    timing: Timing
    attention: AttentionSummary | None


@dataclass(frozen=True)
class Failed:
    """The request was refused, or the engine lost it."""

    request_id: str
    error: SharpError


Event = Accepted | Delta | Finished | Failed
