"""The metrics under vLLM's names, for dashboards and autoscalers that were written for it."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

# Ours without _total, as `prometheus_client` names counters, and vLLM's.
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
    """Repeats the metrics of a registry under other names."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def describe(self) -> Iterator[Metric]:
        """Their names, for scrapes of some."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        """Each as it is now."""
        for metric in self._registry.collect():
            for name in VLLM.get(metric.name, ()):
                alias = Metric(name, metric.documentation, metric.type)
                for sample in metric.samples:
                    labels = {LABELS.get(label, label): value for label, value in sample.labels.items()}
                    suffix = sample.name.removeprefix(metric.name)
                    alias.add_sample(name + suffix, labels, sample.value, sample.timestamp, sample.exemplar)
                yield alias
