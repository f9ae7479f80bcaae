"""The Prometheus metrics of a server."""

from prometheus_client import CollectorRegistry, disable_created_metrics

from sharp.plugins.manifest import Manifest
from sharp.serving.config import MetricsConfig
from sharp.serving.engine.report import EngineReport
from sharp.serving.metrics.attention import AttentionMetrics
from sharp.serving.metrics.requests import RequestMetrics

__all__ = ["Metrics"]

disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """All metrics of one model, in a registry of their own."""

    def __init__(self, manifest: Manifest, config: MetricsConfig) -> None:
        self.registry = CollectorRegistry()
        self._requests = RequestMetrics(self.registry, manifest.name)
        self._attention = AttentionMetrics(manifest, config)
        self.registry.register(self._attention)

    def observe(self, report: EngineReport) -> None:
        """Take a report of the engine, in the engine's thread; attention is added up in a thread of its own."""
        self._requests.observe(report)
        for rows in report.attention:
            self._attention.put(rows)

    def close(self) -> None:
        """End the thread."""
        self._attention.close()
