"""`RequestRecord`: what became of one request, for the log and for traces."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from sharp.serving.api.events import Delta, Event, Failed, Finished, PromptChunk, PromptComputed, Timing
from sharp.serving.api.request import Request


@dataclass(frozen=True)
class RequestOrigin:
    """How a request came: by which protocol, and with what headers (names in lower case)."""

    protocol: str
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class RequestRecord:
    """Filled while the request runs; times are seconds of `time.perf_counter`.

    Attributes:
        origin: how it came.
        arrived: when it came.
        request: what the engine was given; None while its fields are checked, and when they were refused.
        submitted: when the engine got it.
        chunks: the steps that read its prompt.
        cached_tokens: tokens of the prompt that the prefix cache had.
        generated_tokens: of all completions.
        timing: the engine's, of the completion that ended last.
        reasons: why its completions ended, by number.
        computed: when the engine was done with it.
        ended: when its last message had been handed over, or its client was gone.
        error: why it failed.
    """

    origin: RequestOrigin
    arrived: float = field(default_factory=time.perf_counter)
    request: Request | None = None
    submitted: float | None = None
    chunks: tuple[PromptChunk, ...] = ()
    cached_tokens: int = 0
    generated_tokens: int = 0
    timing: Timing | None = None
    reasons: dict[int, str] = field(default_factory=dict)
    computed: float | None = None
    ended: float | None = None
    error: str | None = None

    def take(self, event: Event, now: float) -> None:
        """Note what an event says, which came at `now`."""
        if isinstance(event, PromptComputed):
            self.chunks, self.cached_tokens = event.chunks, event.cached_tokens
        elif isinstance(event, Delta):
            self.generated_tokens += len(event.token_ids)
        elif isinstance(event, Finished):
            self.reasons[event.index] = str(event.reason)
            self.timing, self.computed = event.timing, now
        elif isinstance(event, Failed):
            self.error, self.computed = str(event.error), now

    @property
    def outcome(self) -> str:
        """Why it ended: "error", "cancelled" when its client was gone first, or the reasons of its completions."""
        if self.error is not None:
            return "error"
        if self.request is None or len(self.reasons) < self.request.completions:
            return "cancelled"
        return ",".join(sorted(set(self.reasons.values())))
