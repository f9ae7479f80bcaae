"""`Refusals`: counts requests that end with an error, by protocol, status and reason."""

from contextvars import ContextVar
from dataclasses import dataclass

from prometheus_client import Counter

from sharp.serving.api.errors import (
    AlreadyExistsError,
    ContextLengthError,
    DrainingError,
    EngineError,
    InputError,
    NotFoundError,
    QueueFullError,
    SharpError,
    SlowReaderError,
    StalledError,
    TimeLimitError,
    UnauthenticatedError,
    UnavailableError,
)

# The first entry whose class matches an error gives its reason.
REASONS: tuple[tuple[type[SharpError], str], ...] = (
    (UnauthenticatedError, "unauthenticated"),
    (QueueFullError, "queue_full"),
    (SlowReaderError, "slow_reader"),
    (DrainingError, "draining"),
    (StalledError, "stalled"),
    (TimeLimitError, "time_limit"),
    (UnavailableError, "unavailable"),
    (ContextLengthError, "context_length"),
    (AlreadyExistsError, "already_exists"),
    (NotFoundError, "not_found"),
    (InputError, "invalid"),
    (EngineError, "engine"),
)
OTHER = "other"
# These refusals have alerts. Their series exist from the start, because a rate would miss the first refusal otherwise.
FLOODS = (
    ("http", "401", "unauthenticated"),
    ("http", "429", "queue_full"),
    ("kserve-http", "401", "unauthenticated"),
    ("kserve-http", "429", "queue_full"),
    ("grpc", "UNAUTHENTICATED", "unauthenticated"),
    ("grpc", "RESOURCE_EXHAUSTED", "queue_full"),
    ("kserve-grpc", "UNAUTHENTICATED", "unauthenticated"),
    ("kserve-grpc", "RESOURCE_EXHAUSTED", "queue_full"),
)


class Refusals:
    """The Prometheus counter of refused requests of one model, by protocol, status and reason."""

    def __init__(self, counter: Counter, model: str) -> None:
        self._counter = counter
        self._model = model
        for labels in FLOODS:
            counter.labels(model, *labels)

    def count(self, protocol: str, status: str, reason: str) -> None:
        """Add 1 to the counter of refused requests of a protocol ("http", "grpc"), with this status and reason."""
        self._counter.labels(self._model, protocol, status, reason).inc()


@dataclass
class Refusable:
    """A request that is being served, with the counter and labels to count it if it is refused.

    `reason` is the label of the reason, which `note_reason` sets.
    """

    refusals: Refusals
    protocol: str
    reason: str = OTHER

    def refused(self, status: str) -> None:
        """Count the request as refused with the given HTTP or gRPC `status`, under its protocol and reason."""
        self.refusals.count(self.protocol, status, self.reason)


# The request that the current task serves. The code that creates an error notes the reason here, and the code that
# sends the error knows the status.
CURRENT: ContextVar[Refusable | None] = ContextVar("sharp_refusable", default=None)


def note_reason(error: SharpError) -> Refusable | None:
    """Record why the current task's request is refused, and return the request; None outside of a request."""
    current = CURRENT.get()
    if current is not None:
        current.reason = next((reason for kind, reason in REASONS if isinstance(error, kind)), OTHER)
    return current
