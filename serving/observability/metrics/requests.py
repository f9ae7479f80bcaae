"""`RequestMetrics`: the metrics of requests, tokens and steps."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from sharp.serving.api.events import FinishReason
from sharp.serving.engine.report import Completed, EngineReport
from sharp.serving.observability.metrics.exposition import unit_of
from sharp.serving.observability.refusals import Refusals

# The buckets are those of the corresponding vLLM metrics, so that one dashboard compares both servers.
FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
# Small models on a CPU respond faster than vLLM's first bucket.
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


# Counters and gauges by the field of `EngineReport` that they add up or show: name and description.
COUNTERS = {
    "prompt_tokens": (
        "sharp_prompt_tokens_total",
        "Tokens of the prompts that were read, computed or from the prefix cache.",
    ),
    "generated_tokens": ("sharp_generated_tokens_total", "Generated tokens."),
    "draft_tokens": ("sharp_draft_tokens_total", "Draft tokens of speculative decoding (prompt lookup)."),
    "accepted_tokens": (
        "sharp_accepted_draft_tokens_total",
        "Draft tokens that the model accepted; each saves a step.",
    ),
    "preemptions": ("sharp_preemptions_total", "Requests that gave back their blocks for others."),
    "refused": ("sharp_requests_refused_total", "Requests that were refused, as too much waited."),
    "prefix_cache_queries": (
        "sharp_prefix_cache_queries_total",
        "Prompt tokens that were looked up in the prefix cache.",
    ),
    "prefix_cache_hits": ("sharp_prefix_cache_hits_total", "Prompt tokens that the prefix cache had."),
    "padding_tokens": ("sharp_encoder_padding_tokens_total", "Padding behind the texts of an encoder's batches."),
}
GAUGES = {
    "running": ("sharp_requests_running", "Requests that hold cache blocks."),
    "waiting": ("sharp_requests_waiting", "Requests that wait for their first step or for blocks."),
    "cache_usage": ("sharp_kv_cache_usage_ratio", "Share of the key-value cache that requests hold."),
}
# Histograms by their buckets, and by what they observe.
HISTOGRAMS = {
    FIRST_TOKEN_BUCKETS: {
        "first_token": ("sharp_time_to_first_token_seconds", "From the arrival of a request to its first token."),
    },
    INTER_TOKEN_BUCKETS: {
        "inter_token": ("sharp_inter_token_latency_seconds", "Between two tokens of a request."),
        "token": ("sharp_request_time_per_output_token_seconds", "Between two tokens of a completion, on average."),
    },
    REQUEST_BUCKETS: {
        "duration": ("sharp_request_duration_seconds", "From the arrival of a request to its end."),
        "queue": ("sharp_request_queue_seconds", "From the arrival of a request to its first step."),
        "prefill": ("sharp_request_prefill_seconds", "From the first step of a completion to its first token."),
        "decode": ("sharp_request_decode_seconds", "From the first token of a completion to its last."),
    },
    TOKEN_BUCKETS: {
        "prompt": ("sharp_request_prompt_tokens", "Tokens of a completion's prompt."),
        "generated": ("sharp_request_generated_tokens", "Generated tokens of a completion."),
    },
    BATCH_BUCKETS: {
        "batch_texts": ("sharp_encoder_batch_texts", "Texts, or rows of tensors, that were computed together."),
    },
    STEP_BUCKETS: {"step": ("sharp_step_duration_seconds", "Duration of an engine step.")},
}


class RequestFamilies:
    """The metric families of one registry. Every model has a child of each family."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, description: str, *labels: str) -> Counter:
            """Register a counter, labelled by model and `labels`; its unit follows from its name."""
            return Counter(name, description, ["model", *labels], unit=unit_of(name), registry=registry)

        def gauge(name: str, description: str, *labels: str) -> Gauge:
            """Register a gauge, labelled by model and `labels`; its unit follows from its name."""
            return Gauge(name, description, ["model", *labels], unit=unit_of(name), registry=registry)

        def histogram(name: str, description: str, buckets: tuple[float, ...]) -> Histogram:
            """Register a histogram with these upper bounds of buckets, labelled by model."""
            return Histogram(name, description, ["model"], unit=unit_of(name), registry=registry, buckets=buckets)

        self.counters = {field: counter(*described) for field, described in COUNTERS.items()}
        self.gauges = {field: gauge(*described) for field, described in GAUGES.items()}
        self.histograms = {
            what: histogram(*described, buckets)
            for buckets, group in HISTOGRAMS.items()
            for what, described in group.items()
        }
        self.info = gauge("sharp_model_info", "1; the version is that of the model folder.", "version", "norm")
        self.step_running = gauge(
            "sharp_engine_step_running_seconds", "How long the step that runs now has taken; 0 between steps."
        )
        self.finished = counter("sharp_requests_total", "Requests that ended, by reason.", "finish_reason")
        self.refusals = counter(
            "sharp_refusals_total",
            "Requests that ended with an error as their response, by its status and reason.",
            *("protocol", "status", "reason"),
        )


class RequestMetrics:
    """The metrics of one model's requests, tokens and steps, updated from the engine's reports."""

    def __init__(self, families: RequestFamilies, model: str, version: str, norm: str) -> None:
        self._model = model
        self._info = families.info
        self._info_labels = (model, version, norm)
        self._info.labels(*self._info_labels).set(1)
        self._finished = families.finished
        for reason in (*FinishReason, "error"):
            self._finished.labels(model, reason)
        self.refusals = Refusals(families.refusals, model)
        self._step_running = families.step_running.labels(model)
        self._counters = {field: family.labels(model) for field, family in families.counters.items()}
        self._gauges = {field: family.labels(model) for field, family in families.gauges.items()}
        self._histograms = {what: family.labels(model) for what, family in families.histograms.items()}

    def forget(self) -> None:
        """Remove the info series of the model. Its counters stay for a later model of the same name."""
        self._info.remove(*self._info_labels)

    def watch_step(self, seconds_in_step: Callable[[], float]) -> None:
        """Call `seconds_in_step`, the duration of the step that runs now, whenever the metrics are read."""
        self._step_running.set_function(seconds_in_step)

    def observe(self, report: EngineReport) -> None:
        """Add the numbers of an engine's report to the counters and histograms, and set the gauges to its state."""
        for field, counter in self._counters.items():
            counter.inc(getattr(report, field))
        for field, gauge in self._gauges.items():
            gauge.set(getattr(report, field))
        histograms = self._histograms
        for ended in report.finished:
            exemplar = _exemplar(ended.request_id)
            self._finished.labels(self._model, ended.reason).inc(1, exemplar)
            histograms["duration"].observe(ended.seconds, exemplar)
        for completed in report.completed:
            self._complete(completed)
        times = {"queue": report.queue, "first_token": report.first_token, "inter_token": report.inter_token}
        for what, each in times.items():
            for timed in each:
                histograms[what].observe(timed.seconds, _exemplar(timed.request_id))
        for texts in report.batch_texts:
            histograms["batch_texts"].observe(texts)
        for seconds in report.step_seconds:
            histograms["step"].observe(seconds)

    def _complete(self, completed: Completed) -> None:
        """Observe a completed sequence in the histograms of tokens and seconds."""
        exemplar, histograms = _exemplar(completed.request_id), self._histograms
        histograms["prompt"].observe(completed.prompt_tokens, exemplar)
        histograms["generated"].observe(completed.generated_tokens, exemplar)
        if completed.prefill_seconds is not None:
            histograms["prefill"].observe(completed.prefill_seconds, exemplar)
        if completed.decode_seconds is not None:
            histograms["decode"].observe(completed.decode_seconds, exemplar)
            if completed.generated_tokens > 1:
                seconds = completed.decode_seconds / (completed.generated_tokens - 1)
                histograms["token"].observe(seconds, exemplar)


def _exemplar(request_id: str) -> dict[str, str] | None:
    """Return the request id as an exemplar, or None if the id, which clients may choose, does not fit.

    An id with unprintable characters does not fit, because Prometheus rejects the whole scrape at a NUL in a label.
    """
    fits = len(request_id) <= MOST_EXEMPLAR_CHARACTERS and request_id.isprintable()
    return {"request_id": request_id} if fits else None
