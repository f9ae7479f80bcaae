"""The metrics of requests and steps."""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from sharp.serving.api.events import FinishReason
from sharp.serving.engine.report import Completed, EngineReport, Timed

# Those of vLLM's metrics of the same meaning, so that one dashboard compares both.
FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
# Small models on a processor respond faster than vLLM's first bucket.
INTER_TOKEN_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
REQUEST_BUCKETS = (*(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680),)
TOKEN_BUCKETS = tuple(factor * 10**power for power in range(6) for factor in (1, 2, 5))
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
STEP_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)

# OpenMetrics allows 128 characters in the labels of an exemplar, their names included.
MOST_EXEMPLAR_CHARACTERS = 128 - len("request_id")


class RequestFamilies:
    """The metric families of one registry; every model has a child of each."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, description: str, unit: str = "", labels: Iterable[str] = ()) -> Counter:
            return Counter(name, description, ["model", *labels], unit=unit, registry=registry)

        def gauge(name: str, description: str, unit: str = "") -> Gauge:
            return Gauge(name, description, ["model"], unit=unit, registry=registry)

        def seconds(name: str, description: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, description, ["model"], unit="seconds", registry=registry, buckets=buckets)

        def tokens(name: str, description: str) -> Histogram:
            return Histogram(name, description, ["model"], unit="tokens", registry=registry, buckets=TOKEN_BUCKETS)

        self.running = gauge("sharp_requests_running", "Requests that hold cache blocks.")
        self.waiting = gauge("sharp_requests_waiting", "Requests that wait for their first step or for blocks.")
        self.cache_usage = gauge(
            "sharp_kv_cache_usage_ratio", "Share of the key-value cache that requests hold.", "ratio"
        )
        self.step_running = gauge(
            "sharp_engine_step_running_seconds",
            "How long the step that runs now has taken; 0 between steps.",
            "seconds",
        )
        self.finished = counter("sharp_requests_total", "Requests that ended, by reason.", labels=["finish_reason"])
        self.refused = counter("sharp_requests_refused_total", "Requests that were refused, as too much waited.")
        self.prompt_tokens = counter(
            "sharp_prompt_tokens_total",
            "Tokens of the prompts that were read, computed or from the prefix cache.",
            "tokens",
        )
        self.generated_tokens = counter("sharp_generated_tokens_total", "Generated tokens.", "tokens")
        self.draft_tokens = counter(
            "sharp_draft_tokens_total", "Draft tokens of speculative decoding (prompt lookup).", "tokens"
        )
        self.accepted_tokens = counter(
            "sharp_accepted_draft_tokens_total", "Draft tokens that the model accepted; each saves a step.", "tokens"
        )
        self.preemptions = counter("sharp_preemptions_total", "Requests that gave back their blocks for others.")
        self.cache_queries = counter(
            "sharp_prefix_cache_queries_total", "Prompt tokens that were looked up in the prefix cache."
        )
        self.cache_hits = counter("sharp_prefix_cache_hits_total", "Prompt tokens that the prefix cache had.")
        self.first_token = seconds(
            "sharp_time_to_first_token_seconds",
            "From the arrival of a request to its first token.",
            FIRST_TOKEN_BUCKETS,
        )
        self.inter_token = seconds(
            "sharp_inter_token_latency_seconds", "Between two tokens of a request.", INTER_TOKEN_BUCKETS
        )
        self.duration = seconds(
            "sharp_request_duration_seconds", "From the arrival of a request to its end.", REQUEST_BUCKETS
        )
        self.queue = seconds(
            "sharp_request_queue_seconds", "From the arrival of a request to its first step.", REQUEST_BUCKETS
        )
        self.prompt = tokens("sharp_request_prompt_tokens", "Tokens of a completion's prompt.")
        self.generated = tokens("sharp_request_generated_tokens", "Generated tokens of a completion.")
        self.prefill = seconds(
            "sharp_request_prefill_seconds",
            "From the first step of a completion to its first token.",
            REQUEST_BUCKETS,
        )
        self.decode = seconds(
            "sharp_request_decode_seconds",
            "From the first token of a completion to its last.",
            REQUEST_BUCKETS,
        )
        self.token_seconds = seconds(
            "sharp_request_time_per_output_token_seconds",
            "Between two tokens of a completion, on average.",
            INTER_TOKEN_BUCKETS,
        )
        self.batch_texts = Histogram(
            "sharp_encoder_batch_texts",
            "Texts, or rows of tensors, that were computed together.",
            ["model"],
            registry=registry,
            buckets=BATCH_BUCKETS,
        )
        self.padding_tokens = counter(
            "sharp_encoder_padding_tokens_total", "Padding behind the texts of an encoder's batches.", "tokens"
        )
        self.step = seconds("sharp_step_duration_seconds", "Duration of an engine step.", STEP_BUCKETS)


class RequestMetrics:
    """What the engine's reports say about requests, tokens and steps of one model."""

    def __init__(self, families: RequestFamilies, model: str) -> None:
        self._model = model
        self._finished = families.finished
        for reason in (*FinishReason, "error"):
            self._finished.labels(model, reason)
        self._step_running = families.step_running.labels(model)
        self._running = families.running.labels(model)
        self._waiting = families.waiting.labels(model)
        self._cache_usage = families.cache_usage.labels(model)
        self._prompt_tokens = families.prompt_tokens.labels(model)
        self._generated_tokens = families.generated_tokens.labels(model)
        self._draft_tokens = families.draft_tokens.labels(model)
        self._accepted_tokens = families.accepted_tokens.labels(model)
        self._preemptions = families.preemptions.labels(model)
        self._refused = families.refused.labels(model)
        self._cache_queries = families.cache_queries.labels(model)
        self._cache_hits = families.cache_hits.labels(model)
        self._first_token = families.first_token.labels(model)
        self._inter_token = families.inter_token.labels(model)
        self._duration = families.duration.labels(model)
        self._queue = families.queue.labels(model)
        self._prompt = families.prompt.labels(model)
        self._generated = families.generated.labels(model)
        self._prefill = families.prefill.labels(model)
        self._decode = families.decode.labels(model)
        self._token_seconds = families.token_seconds.labels(model)
        self._step = families.step.labels(model)
        self._batch_texts = families.batch_texts.labels(model)
        self._padding_tokens = families.padding_tokens.labels(model)

    def watch_step(self, seconds_in_step: Callable[[], float]) -> None:
        """Ask how long the step that runs now has taken whenever the metrics are read."""
        self._step_running.set_function(seconds_in_step)

    def observe(self, report: EngineReport) -> None:
        """Add what a report says."""
        self._running.set(report.running)
        self._waiting.set(report.waiting)
        self._cache_usage.set(report.cache_usage)
        self._prompt_tokens.inc(report.prompt_tokens)
        self._generated_tokens.inc(report.generated_tokens)
        self._draft_tokens.inc(report.draft_tokens)
        self._accepted_tokens.inc(report.accepted_tokens)
        self._preemptions.inc(report.preemptions)
        self._refused.inc(report.refused)
        self._cache_queries.inc(report.prefix_cache_queries)
        self._cache_hits.inc(report.prefix_cache_hits)
        for ended in report.finished:
            exemplar = _exemplar(ended.request_id)
            self._finished.labels(self._model, ended.reason).inc(1, exemplar)
            self._duration.observe(ended.seconds, exemplar)
        for completed in report.completed:
            self._complete(completed)
        _observe(self._queue, report.queue)
        _observe(self._first_token, report.first_token)
        _observe(self._inter_token, report.inter_token)
        for texts in report.batch_texts:
            self._batch_texts.observe(texts)
        self._padding_tokens.inc(report.padding_tokens)
        for seconds in report.step_seconds:
            self._step.observe(seconds)

    def _complete(self, completed: Completed) -> None:
        exemplar = _exemplar(completed.request_id)
        self._prompt.observe(completed.prompt_tokens, exemplar)
        self._generated.observe(completed.generated_tokens, exemplar)
        if completed.prefill_seconds is not None:
            self._prefill.observe(completed.prefill_seconds, exemplar)
        if completed.decode_seconds is not None:
            self._decode.observe(completed.decode_seconds, exemplar)
            if completed.generated_tokens > 1:
                self._token_seconds.observe(completed.decode_seconds / (completed.generated_tokens - 1), exemplar)


def _observe(histogram: Histogram, times: Iterable[Timed]) -> None:
    for timed in times:
        histogram.observe(timed.seconds, _exemplar(timed.request_id))


def _exemplar(request_id: str) -> dict[str, str] | None:
    """The request as an exemplar; None where its id, which clients may choose, does not fit into one.

    At a NUL in a label Prometheus gives up the whole scrape.
    """
    fits = len(request_id) <= MOST_EXEMPLAR_CHARACTERS and request_id.isprintable()
    return {"request_id": request_id} if fits else None
