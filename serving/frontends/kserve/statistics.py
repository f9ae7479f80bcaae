"""What `ModelStatistics` says of the requests that came by KServe's protocol."""

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
        self.count += 1
        self.seconds += seconds

    def message(self) -> messages.StatisticDuration:
        return messages.StatisticDuration(count=self.count, ns=round(self.seconds * 1e9))


@dataclass
class Statistics:
    """Counts since the server started. A request that its client gave up counts nowhere, as in Triton."""

    success: _Duration = field(default_factory=_Duration)
    fail: _Duration = field(default_factory=_Duration)
    queue: _Duration = field(default_factory=_Duration)
    compute: _Duration = field(default_factory=_Duration)
    last: float = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Count what happens inside as one request."""
        began = time.perf_counter()
        try:
            yield
        except Exception:
            self.fail.add(time.perf_counter() - began)
            raise
        self.success.add(time.perf_counter() - began)
        self.last = time.time()

    def add(self, finished: Finished) -> None:
        """Add the times of a finished sequence."""
        queue = finished.timing.queue or 0.0
        self.queue.add(queue)
        self.compute.add(finished.timing.total - queue)

    def message(self, model: str, version: str) -> messages.ModelStatistics:
        """All of it."""
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
