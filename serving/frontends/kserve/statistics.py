"""`Statistics`: the counts and times of KServe's requests, which the RPC ModelStatistics returns."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from sharp.kserve import grpc_service_pb2 as messages
from sharp.serving.api.events import Finished


@dataclass
class _Duration:
    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration in seconds."""
        self.count += 1
        self.seconds += seconds

    def message(self) -> messages.StatisticDuration:
        """Return count and sum (ns) as KServe's message."""
        return messages.StatisticDuration(count=self.count, ns=round(self.seconds * 1e9))


@dataclass
class Statistics:
    """Counts and times of the requests by KServe's protocol since the server started.

    `success`, `fail`, `queue` and `compute` are counts with total times; `last` is the time of the last success in
    seconds since 1970. A request that its client gave up counts nowhere, as in Triton.
    """

    success: _Duration = field(default_factory=_Duration)
    fail: _Duration = field(default_factory=_Duration)
    queue: _Duration = field(default_factory=_Duration)
    compute: _Duration = field(default_factory=_Duration)
    last: float = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Count the `with` block as one request: as `fail` if it raises an Exception, otherwise as `success`."""
        began = time.perf_counter()
        try:
            yield
        except Exception:
            self.fail.add(time.perf_counter() - began)
            raise
        self.success.add(time.perf_counter() - began)
        self.last = time.time()

    def add(self, finished: Finished) -> None:
        """Add the times of a finished sequence in the queue and in the engine."""
        queue = finished.timing.queue or 0.0
        self.queue.add(queue)
        self.compute.add(finished.timing.total - queue)

    def message(self, model: str, version: str) -> messages.ModelStatistics:
        """Return all counts and times as the message ModelStatistics, in which times are in nanoseconds."""
        return messages.ModelStatistics(
            name=model,
            version=version,
            last_inference=round(self.last * 1000),
            inference_count=self.success.count,
            execution_count=self.success.count,
            inference_stats=messages.InferStatistics(
                success=self.success.message(),
                fail=self.fail.message(),
                queue=self.queue.message(),
                compute_infer=self.compute.message(),
            ),
        )
