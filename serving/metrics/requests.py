"""The metrics of requests and steps."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from sharp.serving.engine.events import FinishReason
from sharp.serving.engine.report import EngineReport

LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
STEP_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class RequestMetrics:
    """What the engine's reports say about requests, tokens and steps."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        def counter(name: str, description: str) -> Counter:
            return Counter(name, description, ["model"], registry=registry).labels(model)

        def gauge(name: str, description: str) -> Gauge:
            return Gauge(name, description, ["model"], registry=registry).labels(model)

        def histogram(name: str, description: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, description, ["model"], registry=registry, buckets=buckets).labels(model)

        self._model = model
        self._running = gauge("sharp_requests_running", "Requests that hold cache blocks.")
        self._waiting = gauge("sharp_requests_waiting", "Requests that wait for their first step or for blocks.")
        self._cache_usage = gauge("sharp_kv_cache_usage_ratio", "Share of the key-value cache that requests hold.")
        self._finished = Counter(
            "sharp_requests_total", "Requests that ended, by reason.", ["model", "finish_reason"], registry=registry
        )
        for reason in (*FinishReason, "error"):
            self._finished.labels(model, reason)
        self._prompt_tokens = counter(
            "sharp_prompt_tokens_total", "Tokens of the prompts that were read, computed or from the prefix cache."
        )
        self._generated_tokens = counter("sharp_generated_tokens_total", "Generated tokens.")
        self._preemptions = counter("sharp_preemptions_total", "Requests that gave back their blocks for others.")
        self._cache_queries = counter(
            "sharp_prefix_cache_queries_total", "Prompt tokens that were looked up in the prefix cache."
        )
        self._cache_hits = counter("sharp_prefix_cache_hits_total", "Prompt tokens that the prefix cache had.")
        self._first_token = histogram(
            "sharp_time_to_first_token_seconds", "From the arrival of a request to its first token.", LATENCY_BUCKETS
        )
        self._inter_token = histogram(
            "sharp_inter_token_latency_seconds", "Between two tokens of a request.", STEP_BUCKETS
        )
        self._duration = histogram(
            "sharp_request_duration_seconds", "From the arrival of a request to its end.", LATENCY_BUCKETS
        )
        self._queue = histogram(
            "sharp_request_queue_seconds", "From the arrival of a request to its first step.", LATENCY_BUCKETS
        )
        self._step = histogram("sharp_step_duration_seconds", "Duration of an engine step.", STEP_BUCKETS)

    def observe(self, report: EngineReport) -> None:
        """Add what a report says."""
        self._running.set(report.running)
        self._waiting.set(report.waiting)
        self._cache_usage.set(report.cache_usage)
        self._prompt_tokens.inc(report.prompt_tokens)
        self._generated_tokens.inc(report.generated_tokens)
        self._preemptions.inc(report.preemptions)
        self._cache_queries.inc(report.prefix_cache_queries)
        self._cache_hits.inc(report.prefix_cache_hits)
        for reason, seconds in report.finished:
            self._finished.labels(self._model, reason).inc()
            self._duration.observe(seconds)
        for histogram, values in (
            (self._queue, report.queue_seconds),
            (self._first_token, report.first_token_seconds),
            (self._inter_token, report.inter_token_seconds),
            (self._step, report.step_seconds),
        ):
            for value in values:
                histogram.observe(value)
