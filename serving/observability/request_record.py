"""`RequestRecord`: the history of one request, for the log and for traces."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from sharp.serving.api.events import Delta, Event, Failed, Finished, PromptChunk, PromptComputed, Timing
from sharp.serving.api.request import Request


@dataclass(frozen=True)
class RequestOrigin:
    """The protocol by which a request came, its headers (names in lower case), its client's address and its token.

    Attributes:
        host: the address of the client; empty if it is unknown.
        token: the name of the token (`security.caller.token_name`); empty without one.
        client: the name of the client whose share of the server the request uses (`security.caller.share_of`).
    """

    protocol: str
    headers: Mapping[str, str] = field(default_factory=dict)
    host: str = ""
    token: str = ""
    client: str = ""


@dataclass
class RequestRecord:
    """The history of a request, filled while the request runs. Times are in seconds of `time.perf_counter`.

    Attributes:
        origin: the protocol and the headers of the request.
        arrived: when the request arrived.
        request: the request to the engine; None while its fields are being checked, or if they were refused.
        submitted: when the engine received the request.
        chunks: the chunks in which the prompt was computed.
        cached_tokens: tokens of the prompt that the prefix cache had.
        generated_tokens: generated tokens of all completions.
        timing: the engine's timing of the completion that ended last.
        reasons: the finish reasons of the completions, by index.
        computed: when the engine finished the request.
        ended: when the last message was handed over, or the client was gone.
        error: the reason why the request failed.
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
        """Update the record by an event that arrived at `now` (`time.perf_counter`)."""
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
        """The outcome: "error", "cancelled" if the client left before the end, or the completions' finish reasons."""
        if self.error is not None:
            return "error"
        if self.request is None or len(self.reasons) < self.request.completions:
            return "cancelled"
        return ",".join(sorted(set(self.reasons.values())))
