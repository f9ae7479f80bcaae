"""The Prometheus metrics of a server."""

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, disable_created_metrics

from sharp.plugins.manifest import Manifest
from sharp.serving.config import MetricsConfig
from sharp.serving.engine.report import EngineReport
from sharp.serving.observability.metrics.aliases import Aliases
from sharp.serving.observability.metrics.attention import AttentionModel, attention_families
from sharp.serving.observability.metrics.exposition import encode
from sharp.serving.observability.metrics.heads import HeadStatistics
from sharp.serving.observability.metrics.requests import RequestFamilies, RequestMetrics

__all__ = ["Metrics", "ModelMetrics"]

disable_created_metrics()  # type: ignore[no-untyped-call]


class ModelMetrics:
    """What one model shows."""

    def __init__(self, requests: RequestMetrics, attention: AttentionModel | None) -> None:
        self._requests = requests
        self.attention = attention  # None: off

    def watch_step(self, seconds_in_step: Callable[[], float]) -> None:
        """Ask how long the step that runs now has taken whenever the metrics are read."""
        self._requests.watch_step(seconds_in_step)

    def observe(self, report: EngineReport) -> None:
        """Take a report of the engine, in the engine's thread; attention is added up in a thread of its own."""
        self._requests.observe(report)
        if self.attention is not None:
            for rows in report.attention:
                self.attention.heads.put(rows)

    def close(self) -> None:
        """End the thread."""
        if self.attention is not None:
            self.attention.heads.close()


class Metrics:
    """The metric families of a server, which its models share."""

    def __init__(self, aliases: str = "none") -> None:
        """`aliases` is whose names they have, too."""
        self.registry = CollectorRegistry()  # of all but attention
        self._requests = RequestFamilies(self.registry)
        self._registries = [self.registry]
        if aliases == "vllm":
            self._registries.append(CollectorRegistry())
            self._registries[1].register(Aliases(self.registry))
        self._attention: list[AttentionModel] = []

    def add_model(self, manifest: Manifest, config: MetricsConfig) -> ModelMetrics:
        """The metrics of a model; its name is their label `model`."""
        attention = None
        if config.attention_metrics != "off":
            attention = AttentionModel(manifest, config, HeadStatistics(manifest, config))
            self._attention.append(attention)
        return ModelMetrics(RequestMetrics(self._requests, manifest.name), attention)

    def remove_model(self, metrics: ModelMetrics) -> None:
        """End the metrics of a model that is unloaded; its counters stay, as others may be added to."""
        metrics.close()
        metrics.watch_step(lambda: 0.0)  # the engine and its cache must not stay for this
        self._attention = [model for model in self._attention if model is not metrics.attention]

    def text(self, accept: str, names: Sequence[str] = (), *, per_head: bool = False) -> tuple[bytes, str]:
        """All of them in the format that an `Accept` header asks for, and its content type.

        Only those with samples of one of the `names`, if there are some; `per_head` whatever the settings say.
        """
        models = [model.with_heads if per_head else model for model in self._attention]
        return encode(self._registries, attention_families(models), accept, names)
