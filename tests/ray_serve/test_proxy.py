"""What is put around Serve's own handlers, with handlers of the test in their place."""

import asyncio
import gc

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ray.serve.generated.serve_pb2 import HealthzRequest

from sharp.ray.proxy import RETRY_SECONDS, add_services
from sharp.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc

MESSAGE = inference_pb2.GenerateResponse(delta={"text": "a"})


async def with_proxy(serve, ask):
    """Ask a server whose methods all do what `serve(request, context)` does, as Serve would give them."""

    server = grpc.aio.server()

    class Proxy:
        def add_generic_rpc_handlers(self, handlers):
            methods = handlers[0]._method_handlers
            handlers[0]._method_handlers = {
                name: handler._replace(response_serializer=None, unary_unary=serve, unary_stream=serve)
                for name, handler in methods.items()
            }
            server.add_generic_rpc_handlers(handlers)

    add_services(None, Proxy())
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            return await ask(channel)
    finally:
        await server.stop(None)


def generate(serve, **fields):
    """The texts of a stream, and the error that it ended with."""

    async def ask(channel):
        texts = []
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        try:
            async for message in stub.Generate(inference_pb2.GenerateRequest(**fields)):
                texts.append(message.delta.text)
        except grpc.aio.AioRpcError as error:
            return texts, error
        return texts, None

    return asyncio.run(with_proxy(serve, ask))


def test_a_call_has_its_model_and_the_key_of_its_prompt():
    seen = {}

    async def serve(_request, context):
        seen.update(context.invocation_metadata())
        yield MESSAGE.SerializeToString()

    assert generate(serve, text="a", model="small") == (["a"], None)
    assert seen["multiplexed_model_id"] == "small"
    assert len(seen["session_id"]) == 16


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (grpc.StatusCode.INTERNAL, "was lost; send it again"),
        (grpc.StatusCode.UNAVAILABLE, "no replica can take"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "too many requests"),
    ],
)
def test_a_status_of_serve_says_when_to_come_back(code, message):
    async def serve(_request, context):
        yield MESSAGE.SerializeToString()
        context.set_code(code)
        context.set_details("Serve's own words")

    texts, error = generate(serve)
    assert texts == ["a"]
    assert error.code() == (grpc.StatusCode.UNAVAILABLE if code == grpc.StatusCode.INTERNAL else code)
    details = dict(error.trailing_metadata())
    assert details["grpc-retry-pushback-ms"] == "1000"
    status = status_pb2.Status.FromString(details["grpc-status-details-bin"])
    retry = error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(retry)
    assert retry.retry_delay.seconds == RETRY_SECONDS
    assert message in status.message == error.details()


def test_a_status_of_a_replica_stays_as_it_is():
    async def serve(_request, context):
        context.set_code(grpc.StatusCode.INTERNAL)
        context.set_details("the server failed; its log says why")
        context.set_trailing_metadata([("grpc-status-details-bin", b"")])
        yield b""

    texts, error = generate(serve)
    assert (texts, error.code()) == ([], grpc.StatusCode.INTERNAL)
    assert error.details() == "the server failed; its log says why"


def test_a_unary_call_of_a_lost_replica_is_told_so():
    async def serve(_request, context):
        context.set_code(grpc.StatusCode.INTERNAL)
        return b""

    async def ask(channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await control_pb2_grpc.ControlServiceStub(channel).GetLoad(control_pb2.GetLoadRequest())
        return caught.value.code()

    assert asyncio.run(with_proxy(serve, ask)) == grpc.StatusCode.UNAVAILABLE


def test_who_asked_is_known_after_the_call():
    """Serve writes it into its log when all is over; asked then, grpc ended the process now and then."""
    contexts = []

    async def serve(_request, context):
        contexts.append(context)
        yield MESSAGE.SerializeToString()

    assert generate(serve) == (["a"], None)
    gc.collect()
    assert contexts[0].peer().startswith("ipv4:127.0.0.1:")


def test_serve_is_cancelled_where_it_waits():
    """However the stream is left: only there does it cancel the replica's call."""
    cancelled = []

    async def serve(_request, _context):
        for _ in range(1000):
            yield MESSAGE.SerializeToString()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def ask(channel):
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(inference_pb2.GenerateRequest())
        await call.read()
        call.cancel()  # while most of the messages are still to be sent
        for _ in range(200):
            if cancelled:
                return
            await asyncio.sleep(0.01)

    asyncio.run(with_proxy(serve, ask))
    assert cancelled == [True]


@pytest.mark.parametrize(
    ("code", "status"), [(grpc.StatusCode.OK, "SERVING"), (grpc.StatusCode.UNAVAILABLE, "NOT_SERVING")]
)
def test_health_is_what_serve_says(code, status):
    async def serve(request, context):
        assert isinstance(request, HealthzRequest)
        context.set_code(code)
        context.set_details("Serve's own words")

    async def ask(channel):
        health = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest())
        return (await health.Check(health_pb2.HealthCheckRequest())).status, (await watch.read()).status

    assert asyncio.run(with_proxy(serve, ask)) == (health_pb2.HealthCheckResponse.ServingStatus.Value(status),) * 2
