"""What the engine did since its last report, as plain numbers for the metrics."""

from dataclasses import dataclass, field
from typing import Any

from sharp.serving.api.attention import AttentionRows


@dataclass(frozen=True)
class Timed:
    """Something that took `seconds`, and the request that it happened to."""

    seconds: float
    request_id: str


@dataclass(frozen=True)
class Ended:
    """A request that is over: why, and how long after its arrival."""

    reason: str
    seconds: float
    request_id: str


@dataclass(frozen=True)
class Completed:
    """A completion that is over: its tokens, from its first step to its first token, and from that to its last one."""

    prompt_tokens: int
    generated_tokens: int
    prefill_seconds: float | None  # None without a token
    decode_seconds: float | None
    request_id: str


@dataclass(frozen=True)
class EngineReport:
    """The state now and what happened since the last report; all times in seconds."""

    running: int
    waiting: int
    cache_usage: float
    prompt_tokens: int
    generated_tokens: int
    draft_tokens: int  # of speculative decoding
    accepted_tokens: int  # draft tokens that were accepted
    preemptions: int
    refused: int  # requests for which too much waited already
    prefix_cache_queries: int  # prompt tokens that were looked up in the prefix cache
    prefix_cache_hits: int  # those that it had
    finished: tuple[Ended, ...]
    completed: tuple[Completed, ...]
    queue: tuple[Timed, ...]
    first_token: tuple[Timed, ...]
    inter_token: tuple[Timed, ...]
    step_seconds: tuple[float, ...]
    attention: tuple[AttentionRows, ...]
    batch_texts: tuple[int, ...] = ()  # texts in each batch of an encoder
    padding_tokens: int = 0  # behind them


@dataclass
class Tally:
    """What happened since the last report; the fields are those of the report."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0
    refused: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    finished: list[Ended] = field(default_factory=list)
    completed: list[Completed] = field(default_factory=list)
    queue: list[Timed] = field(default_factory=list)
    first_token: list[Timed] = field(default_factory=list)
    inter_token: list[Timed] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    attention: list[AttentionRows] = field(default_factory=list)
    batch_texts: list[int] = field(default_factory=list)
    padding_tokens: int = 0

    def report(self, running: int, waiting: int, cache_usage: float) -> EngineReport:
        """All of it, with the state now."""
        happened: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in vars(self).items()
        }
        return EngineReport(running, waiting, cache_usage, **happened)
