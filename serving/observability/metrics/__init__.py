"""The Prometheus metrics of a server."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, disable_created_metrics
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from sharp.core.manifest import Manifest
from sharp.serving.config import MetricsConfig
from sharp.serving.engine.report import EngineReport
from sharp.serving.observability.metrics.attention import AttentionModel, attention_families
from sharp.serving.observability.metrics.exposition import encode
from sharp.serving.observability.metrics.heads import HeadStatistics
from sharp.serving.observability.metrics.requests import RequestFamilies, RequestMetrics

__all__ = ["Metrics", "ModelMetrics"]

disable_created_metrics()  # type: ignore[no-untyped-call]

# Names of Sharp's metrics, without _total as `prometheus_client` names counters, and of the vLLM metrics.
VLLM = {
    "sharp_requests_running": ("vllm:num_requests_running",),
    "sharp_requests_waiting": ("vllm:num_requests_waiting",),
    "sharp_kv_cache_usage_ratio": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "sharp_prompt_tokens": ("vllm:prompt_tokens",),
    "sharp_generated_tokens": ("vllm:generation_tokens",),
    "sharp_requests": ("vllm:request_success",),
    "sharp_preemptions": ("vllm:num_preemptions",),
    "sharp_prefix_cache_queries": ("vllm:prefix_cache_queries",),
    "sharp_prefix_cache_hits": ("vllm:prefix_cache_hits",),
    "sharp_time_to_first_token_seconds": ("vllm:time_to_first_token_seconds",),
    "sharp_inter_token_latency_seconds": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    "sharp_request_duration_seconds": ("vllm:e2e_request_latency_seconds",),
    "sharp_request_queue_seconds": ("vllm:request_queue_time_seconds",),
    "sharp_request_prompt_tokens": ("vllm:request_prompt_tokens",),
    "sharp_request_generated_tokens": ("vllm:request_generation_tokens", "vllm:request_max_num_generation_tokens"),
    "sharp_request_prefill_seconds": ("vllm:request_prefill_time_seconds",),
    "sharp_request_decode_seconds": ("vllm:request_decode_time_seconds",),
    "sharp_request_time_per_output_token_seconds": ("vllm:request_time_per_output_token_seconds",),
    "sharp_draft_tokens": ("vllm:spec_decode_num_draft_tokens",),
    "sharp_accepted_draft_tokens": ("vllm:spec_decode_num_accepted_tokens",),
}
LABELS = {"model": "model_name", "finish_reason": "finished_reason"}


class Aliases(Collector):
    """A Prometheus collector that repeats the metrics of `registry` under vLLM's names and labels."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def describe(self) -> Iterator[Metric]:
        """Return the metrics for their names, which scrapes restricted to some names need."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        """Yield the current state of each metric under its other names."""
        for metric in self._registry.collect():
            for name in VLLM.get(metric.name, ()):
                alias = Metric(name, metric.documentation, metric.type)
                for sample in metric.samples:
                    labels = {LABELS.get(label, label): value for label, value in sample.labels.items()}
                    suffix = sample.name.removeprefix(metric.name)
                    alias.add_sample(name + suffix, labels, sample.value, sample.timestamp, sample.exemplar)
                yield alias


class ModelMetrics:
    """The metrics of one model, updated from the engine's reports: of requests and, if they are on, of attention."""

    def __init__(self, requests: RequestMetrics, attention: AttentionModel | None) -> None:
        self._requests = requests
        self.refusals = requests.refusals
        self.attention = attention  # None if attention metrics are off

    def watch_step(self, seconds_in_step: Callable[[], float]) -> None:
        """Call `seconds_in_step`, the duration of the step that runs now, whenever the metrics are read."""
        self._requests.watch_step(seconds_in_step)

    def observe(self, report: EngineReport) -> None:
        """Take a report of the engine, in the engine's thread. Another thread adds up the attention statistics."""
        self._requests.observe(report)
        if self.attention is not None:
            for rows in report.attention:
                self.attention.heads.put(rows)

    def close(self) -> None:
        """End the thread that adds up attention statistics, and remove the model's info series."""
        self._requests.forget()
        if self.attention is not None:
            self.attention.heads.close()


class Metrics:
    """All Prometheus metrics of a server: families that its models share, and the text of `/metrics`."""

    def __init__(self, aliases: str = "none") -> None:
        """Create the families. If `aliases` is "vllm", they also appear under vLLM's names."""
        self.registry = CollectorRegistry()  # registry of all metrics but those of attention
        self._requests = RequestFamilies(self.registry)
        self._registries = [self.registry]
        if aliases == "vllm":
            self._registries.append(CollectorRegistry())
            self._registries[1].register(Aliases(self.registry))
        self._attention: list[AttentionModel] = []

    def add_model(self, manifest: Manifest, config: MetricsConfig, version: str = "") -> ModelMetrics:
        """Create and return the metrics of a model. Its name is their label `model`, and `version` is the folder's.

        End them with `remove_model`.

        Raises:
            NotFoundError: there is no file `attention_baseline`.
            InputError: the file `attention_baseline` is of another kind, or of another model.
        """
        attention = None
        if config.attention_metrics != "off":
            attention = AttentionModel(manifest, config, HeadStatistics(manifest, config))
            self._attention.append(attention)
        requests = RequestMetrics(self._requests, manifest.name, version, manifest.norm.name)
        return ModelMetrics(requests, attention)

    def remove_model(self, metrics: ModelMetrics) -> None:
        """End the metrics of an unloaded model. Its counters stay for a later model of the same name."""
        metrics.close()
        metrics.watch_step(lambda: 0.0)  # the gauge must not keep the engine and its cache alive
        self._attention = [model for model in self._attention if model is not metrics.attention]

    def text(self, accept: str, names: Sequence[str] = (), *, per_head: bool = False) -> tuple[bytes, str]:
        """Return the metrics in the format that an `Accept` header asks for, and the content type.

        If `names` are given, only metrics with samples of these names are included. `per_head` includes series of heads
        regardless of the settings.
        """
        models = [model.with_heads if per_head else model for model in self._attention]
        return encode(self._registries, attention_families(models), accept, names)
