"""Plain numbers about what the engine did since its last report, for the metrics."""

from dataclasses import dataclass, field
from typing import Any

from sharp.serving.api.attention import AttentionRows


@dataclass(frozen=True)
class Timed:
    """A duration in seconds, and the request that it belongs to."""

    seconds: float
    request_id: str


@dataclass(frozen=True)
class Ended:
    """An ended request: the reason, and the seconds since its arrival."""

    reason: str
    seconds: float
    request_id: str


@dataclass(frozen=True)
class Completed:
    """A finished sequence: its numbers of tokens, and the seconds that prefill (to the first token) and decode took.

    The seconds are None if there was no token.
    """

    prompt_tokens: int
    generated_tokens: int
    prefill_seconds: float | None
    decode_seconds: float | None
    request_id: str


@dataclass(frozen=True)
class EngineReport:
    """The engine's current state, and what happened since its last report. All times are in seconds.

    Attributes:
        running: sequences that run now.
        waiting: sequences that wait now.
        cache_usage: the share of cache blocks that sequences hold now, from 0 to 1.
        prompt_tokens: tokens of the prompts that are now in the cache, cached tokens included.
        generated_tokens: tokens that were generated.
        draft_tokens: draft tokens of speculative decoding that were computed.
        accepted_tokens: draft tokens that were accepted.
        preemptions: sequences that gave back their blocks for others.
        refused: requests refused because the queue was full.
        prefix_cache_queries: prompt tokens that were looked up in the prefix cache.
        prefix_cache_hits: prompt tokens that the prefix cache had.
        finished: requests that ended.
        completed: sequences that ended, except by an error.
        queue: times from arrival to the first step.
        first_token: times from arrival to the first token.
        inter_token: for every token after the first, the time since the token before.
        step_seconds: durations of steps.
        attention: attention statistics of steps that collected them.
        batch_texts: numbers of texts in each batch of an encoder.
        padding_tokens: padding tokens in the batches of an encoder.
    """

    running: int
    waiting: int
    cache_usage: float
    prompt_tokens: int
    generated_tokens: int
    draft_tokens: int
    accepted_tokens: int
    preemptions: int
    refused: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    finished: tuple[Ended, ...]
    completed: tuple[Completed, ...]
    queue: tuple[Timed, ...]
    first_token: tuple[Timed, ...]
    inter_token: tuple[Timed, ...]
    step_seconds: tuple[float, ...]
    attention: tuple[AttentionRows, ...]
    batch_texts: tuple[int, ...] = ()
    padding_tokens: int = 0


@dataclass
class Tally:
    """The counts that an engine adds up between two reports; its fields are those of `EngineReport`."""

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
        """Return a report of these counts together with the engine's current state; the counts stay as they are.

        `running` and `waiting` are numbers of sequences, `cache_usage` is the share of blocks held, from 0 to 1.
        """
        happened: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in vars(self).items()
        }
        return EngineReport(running, waiting, cache_usage, **happened)
