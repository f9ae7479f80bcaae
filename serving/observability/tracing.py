"""OpenTelemetry traces: a span for every request, with child spans for its parts.

W3C trace context is read from the headers of a request and returned with its response. Spans are created when a request
has ended, from times that are recorded anyway, so tracing adds nothing to a step of the engine.
"""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from sharp.serving.api.errors import InputError
from sharp.serving.observability.request_record import RequestOrigin, RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span

MISSING = "traces need OpenTelemetry; install it with: pip install 'sharp-attention[tracing]'"
EXPORT_SECONDS = 2  # time that the server, when it ends, waits for a collector that does not respond
# Offset from `time.perf_counter` to the nanoseconds since 1970 that spans use.
EPOCH_NANOSECONDS = time.time_ns() - time.perf_counter_ns()


class Tracing:
    """A tracer that creates spans and exports them. Times are in seconds of `time.perf_counter`."""

    def __init__(self, processor: "SpanProcessor", version: str) -> None:
        """Export spans through `processor`.

        Raises:
            InputError: OpenTelemetry is not installed.
        """
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise InputError(MISSING) from error
        resource = Resource.create({"service.name": "sharp", "service.version": version})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("sharp.serving", version)
        self._propagator = TraceContextTextMapPropagator()

    def start(self, origin: RequestOrigin, arrived: float) -> "RequestSpan":
        """Start the span of a request that has arrived, within the trace that the request's headers name."""
        from opentelemetry.trace import SpanKind

        parent = self._propagator.extract(dict(origin.headers))
        span = self._tracer.start_span("sharp.request", parent, SpanKind.SERVER, start_time=_nanoseconds(arrived))
        return RequestSpan(self, span)

    def headers(self, span: "Span") -> dict[str, str]:
        """Return the W3C trace context of a span, as headers."""
        from opentelemetry.trace import set_span_in_context

        found: dict[str, str] = {}
        self._propagator.inject(found, set_span_in_context(span))
        return found

    def part(self, parent: "Span", name: str, began: float, ended: float, attributes: Mapping[str, int]) -> None:
        """Create a child span of `parent`; `began` and `ended` are seconds of `time.perf_counter`."""
        from opentelemetry.trace import set_span_in_context

        span = self._tracer.start_span(
            name, set_span_in_context(parent), attributes=dict(attributes), start_time=_nanoseconds(began)
        )
        span.end(_nanoseconds(ended))

    def close(self) -> None:
        """Export the remaining spans and shut down."""
        self._provider.shutdown()


class RequestSpan:
    """The OpenTelemetry span of one request; `headers` hold its trace context for the response."""

    def __init__(self, tracing: Tracing, span: "Span") -> None:
        self._tracing = tracing
        self._span = span
        self.headers = tracing.headers(span)

    @property
    def trace_id(self) -> str:
        """The id of the trace, as 32 hexadecimal digits."""
        return format(self._span.get_span_context().trace_id, "032x")

    def end(self, record: RequestRecord, model: str) -> None:
        """End the span, with a child span for every part of the request."""
        from opentelemetry.trace import StatusCode

        ended = record.ended if record.ended is not None else time.perf_counter()
        span, part = self._span, self._tracing.part
        # Names follow OpenTelemetry's conventions for generative models, where these have a name.
        span.set_attributes(
            {
                "gen_ai.response.model": model,
                "gen_ai.response.finish_reasons": [*record.reasons.values()],
                "gen_ai.usage.output_tokens": record.generated_tokens,
                "sharp.protocol": record.origin.protocol,
                "sharp.outcome": record.outcome,
            }
        )
        if record.request is not None:
            span.set_attribute("gen_ai.response.id", record.request.request_id)
            span.set_attribute("gen_ai.usage.input_tokens", record.request.prompt_tokens)
            span.set_attribute("sharp.cached_tokens", record.cached_tokens)
        if record.error is not None:
            span.set_status(StatusCode.ERROR, record.error)
        part(span, "prepare", record.arrived, record.submitted or ended, {})
        if record.submitted is not None:
            computed = record.computed or ended
            part(span, "queue", record.submitted, record.chunks[0].began if record.chunks else computed, {})
            for chunk in record.chunks:
                part(span, "prefill", chunk.began, chunk.ended, {"sharp.tokens": chunk.tokens})
            if record.chunks and record.generated_tokens:
                part(span, "decode", record.chunks[-1].ended, computed, {"sharp.tokens": record.generated_tokens})
            if record.computed is not None:
                part(span, "send", computed, ended, {})
        span.end(_nanoseconds(ended))


def otlp_tracing(endpoint: str, version: str) -> Tracing:
    """Return a `Tracing` that sends spans over OTLP (gRPC) to `endpoint`, such as http://127.0.0.1:4317.

    Raises:
        InputError: OpenTelemetry is not installed, or the endpoint is not an address.
    """
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise InputError(MISSING) from error
    if not endpoint.startswith(("http://", "https://")):
        raise InputError(f"otlp_traces_endpoint is {endpoint!r}; it must be as http://127.0.0.1:4317")
    return Tracing(BatchSpanProcessor(OTLPSpanExporter(endpoint, timeout=EXPORT_SECONDS)), version)


def _nanoseconds(seconds: float) -> int:
    """Return a time of perf_counter (seconds) as nanoseconds since 1970."""
    return EPOCH_NANOSECONDS + round(seconds * 1e9)
