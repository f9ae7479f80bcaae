"""Traces of requests, as a collector receives them."""

import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from sharp.serving.api.errors import InputError
from sharp.serving.config import EngineConfig, ServerConfig
from sharp.serving.observability.tracing import otlp_tracing
from sharp.v1 import inference_pb2
from tests.serving.conftest import wait_for
from tests.serving.grpc_client import status

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self):
        self.spans = []

    def Export(self, request, context):
        for resource in request.resource_spans:
            self.service = {entry.key: entry.value.string_value for entry in resource.resource.attributes}
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def of(self, request_id):
        """Return the root and the parts, in order, of a request's trace, which must be complete."""

        def root():
            return [span for span in self.spans if attributes(span).get("gen_ai.response.id") == request_id]

        wait_for(root)
        (found,) = root()
        return found, [span for span in self.spans if span.parent_span_id == found.span_id]


def attributes(span):
    return {entry.key: getattr(entry.value, entry.value.WhichOneof("value")) for entry in span.attributes}


@pytest.fixture(scope="module")
def collector():
    server, collector = grpc.server(ThreadPoolExecutor(1)), Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield collector
    server.stop(None)


@pytest.fixture(scope="module")
def client(connect, counting, collector):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        return connect(
            counting,
            server=ServerConfig(
                grpc_port=0, http_port=0, grace_seconds=0.2, otlp_traces_endpoint=f"http://127.0.0.1:{collector.port}"
            ),
            engine=EngineConfig(max_batch_tokens=4, max_sequences=4),
        )


def call(client, request_id, metadata=()):
    request = inference_pb2.GenerateRequest(
        request_id=request_id, text="abcdefghij", sampling={"temperature": 0}, stopping={"max_tokens": 5}
    )
    stream = client.inference.Generate(request, timeout=20, metadata=metadata)
    list(stream)
    return dict(stream.initial_metadata())


def test_a_request_is_a_trace_of_its_parts(client, collector):
    call(client, "parts")
    root, parts = collector.of("parts")
    assert (root.name, root.kind, collector.service["service.name"]) == (
        "sharp.request",
        root.SPAN_KIND_SERVER,
        "sharp",
    )
    assert [part.name for part in parts] == ["prepare", "queue", *["prefill"] * 3, "decode", "send"]
    chunks = [attributes(part)["sharp.tokens"] for part in parts if part.name == "prefill"]
    assert chunks == [4, 4, 2]
    # The parts follow one another within the root.
    times = [time for part in parts for time in (part.start_time_unix_nano, part.end_time_unix_nano)]
    assert times == sorted(times)
    assert root.start_time_unix_nano <= times[0]
    assert times[-1] <= root.end_time_unix_nano
    found = attributes(root)
    assert (found["gen_ai.usage.input_tokens"], found["gen_ai.usage.output_tokens"]) == (10, 5)
    assert (found["sharp.outcome"], found["sharp.protocol"]) == ("length", "grpc")
    assert not any("abcdefghij" in str(span) for span in collector.spans)


def test_trace_context_is_accepted_and_returned(client, collector):
    returned = call(client, "traced", [("traceparent", TRACEPARENT)])
    root, _ = collector.of("traced")
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT)
    assert returned["traceparent"] == f"00-{TRACE}-{root.span_id.hex()}-01"
    assert call(client, "own")["traceparent"].split("-")[1] != TRACE


def test_a_trace_that_is_not_sampled_is_not_sent(client, collector):
    returned = call(client, "unsampled", [("traceparent", TRACEPARENT[:-1] + "0")])
    assert returned["traceparent"].startswith(f"00-{TRACE}-")
    assert returned["traceparent"].endswith("-00")
    call(client, "after")
    collector.of("after")
    assert not any(attributes(span).get("gen_ai.response.id") == "unsampled" for span in collector.spans)


def test_trace_context_over_http(start_server, counting, collector, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    endpoint = f"http://127.0.0.1:{collector.port}"
    started = start_server(
        counting, server=ServerConfig(grpc_port=0, http_port=0, grace_seconds=0.2, otlp_traces_endpoint=endpoint)
    )
    for stream in ("false", "true"):
        body = f'{{"model": "counting", "prompt": "ab", "max_tokens": 2, "stream": {stream}}}'.encode()
        request = urllib.request.Request(
            f"http://{started.http_address}/v1/completions", body, {"traceparent": TRACEPARENT}
        )
        with urllib.request.urlopen(request, timeout=20) as response:
            response.read()
        span = response.headers["traceparent"].split("-")[2]
        wait_for(lambda span=span: any(found.span_id.hex() == span for found in collector.spans))
        (root,) = [found for found in collector.spans if found.span_id.hex() == span]
        assert (root.trace_id.hex(), attributes(root)["sharp.protocol"]) == (TRACE, "http")


def test_a_failure_is_one_in_its_trace(client, collector):
    def failed():
        return [span for span in collector.spans if span.status.code == span.status.STATUS_CODE_ERROR]

    _, details = status(lambda: client.generate("a", sampling={"temperature": -1}))
    wait_for(failed)
    assert failed()[-1].status.message == details


def test_there_is_no_trace_context_without_tracing(connect, counting):
    assert "traceparent" not in call(connect(counting), "plain", [("traceparent", TRACEPARENT)])


def test_what_is_missing_is_said(monkeypatch):
    with pytest.raises(InputError, match="otlp_traces_endpoint is 'collector:4317'; it must be as http://"):
        otlp_tracing("collector:4317", "0")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(InputError, match=r"pip install 'sharp-attention\[tracing\]'"):
        otlp_tracing("http://127.0.0.1:4317", "0")
