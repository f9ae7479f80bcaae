"""The trace of a request through a proxy and a replica, in Serve's hands but without a cluster."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from ray.serve.grpc_util import RayServegRPCContext

from sharp.ray.context import ReplicaContext
from sharp.serving.frontends.grpc.inference import InferenceService
from sharp.serving.frontends.running import run_model
from sharp.serving.observability.metrics import Metrics
from sharp.v1 import inference_pb2, inference_pb2_grpc
from tests.full.ray.test_proxy import with_proxy
from tests.serving.conftest import SETTINGS, write_folder
from tests.serving.observability.test_tracing import TRACE, TRACEPARENT, Collector


async def ask(channel):
    request = inference_pb2.GenerateRequest(text="a", request_id="mine", stopping={"max_tokens": 2})
    call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, metadata=[("traceparent", TRACEPARENT)])
    assert len([message async for message in call]) == 4  # of the prompt, two tokens, and the end
    return dict(await call.initial_metadata()), dict(await call.trailing_metadata())


async def through_serve(folder, endpoint):
    settings = replace(SETTINGS, server=replace(SETTINGS.server, otlp_traces_endpoint=endpoint))
    async with run_model(folder, settings, Metrics()) as running:
        servicer = InferenceService(running.service)

        async def serve(request, context):
            own = RayServegRPCContext(context)  # the context as Serve's proxy makes it, which then adds its own id
            own.set_trailing_metadata([("request_id", "of Serve")])
            async for batch in ReplicaContext(own).stream(servicer.Generate, request):
                own._set_on_grpc_context(context)
                yield batch.SerializeToString()

        return await with_proxy(serve, ask)


def test_a_response_tells_its_trace(tmp_path):
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        initial, trailing = asyncio.run(through_serve(write_folder(tmp_path / "counting", hashing=0), endpoint))
    finally:
        server.stop(None)
    (span,) = (span for span in collector.spans if span.name == "sharp.request")
    assert span.trace_id.hex() == TRACE
    assert initial == {"traceparent": f"00-{TRACE}-{span.span_id.hex()}-01", "sharp-request-id": "mine"}
    assert trailing == {"request_id": "of Serve"}
