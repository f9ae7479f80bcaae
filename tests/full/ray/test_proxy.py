"""The wrappers around the handlers of Serve's proxy, with the test's own handlers in their place."""

import asyncio
import gc

import grpc
import pytest
from google.protobuf import empty_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ray.serve._private.grpc_util import set_grpc_code_and_details
from ray.serve._private.proxy_request_response import ResponseStatus
from ray.serve.generated.serve_pb2 import HealthzRequest

from sharp.kserve import grpc_service_pb2, grpc_service_pb2_grpc
from sharp.ray.backpressure import MessageBatch
from sharp.ray.proxy import RETRY_SECONDS, add_services
from sharp.serving.frontends.grpc import status
from sharp.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc

MESSAGE = inference_pb2.GenerateResponse(delta={"text": "a"})


async def with_proxy(serve, ask):
    """Send requests by `ask` to a server with Sharp's wrappers; each method calls `serve(request, context)`."""

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
    """Return the texts of a stream, and the error that ended it or None."""

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


def test_messages_come_one_by_one_however_many_there_are_at_a_time():
    async def serve(_request, _context):
        yield MessageBatch([MESSAGE, MESSAGE]).SerializeToString()
        yield MessageBatch([MESSAGE]).SerializeToString()

    assert generate(serve) == (["a", "a", "a"], None)


def test_a_call_has_its_model_and_the_key_of_its_prompt():
    seen = {}

    async def serve(_request, context):
        seen.update(context.invocation_metadata())
        yield MessageBatch([MESSAGE]).SerializeToString()

    assert generate(serve, text="a", model="small") == (["a"], None)
    assert seen["multiplexed_model_id"] == "small"
    assert len(seen["session_id"]) == 16


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (grpc.StatusCode.INTERNAL, "was lost; send it again"),
        (grpc.StatusCode.CANCELLED, "was lost; send it again"),
        (grpc.StatusCode.UNAVAILABLE, "no replica can take"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "too many requests"),
    ],
)
def test_a_status_of_serve_says_when_to_come_back(code, message):
    async def serve(_request, context):
        yield MessageBatch([MESSAGE]).SerializeToString()
        context.set_code(code)
        context.set_details("Serve's own words")

    texts, error = generate(serve)
    assert texts == ["a"]
    full = grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.code() == (full if code == full else grpc.StatusCode.UNAVAILABLE)
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
        yield MessageBatch([empty_pb2.Empty()]).SerializeToString()

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
    """The address of a client is known after the call.

    Serve logs the address after the end of the call. When it asked grpc for it then, the process crashed now and then.
    """
    contexts = []

    async def serve(_request, context):
        contexts.append(context)
        yield MessageBatch([MESSAGE]).SerializeToString()

    assert generate(serve) == (["a"], None)
    gc.collect()
    assert contexts[0].peer().startswith("ipv4:127.0.0.1:")


def test_serve_is_cancelled_where_it_waits():
    """A stream is cancelled where Serve waits, however the client leaves the stream.

    Only there does Serve cancel the call of the replica.
    """
    cancelled = []

    async def serve(_request, _context):
        for _ in range(1000):
            yield MessageBatch([MESSAGE]).SerializeToString()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def ask(channel):
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(inference_pb2.GenerateRequest())
        await call.read()
        call.cancel()  # while most of the messages are not yet sent
        for _ in range(200):
            if cancelled:
                return
            await asyncio.sleep(0.01)

    asyncio.run(with_proxy(serve, ask))
    assert cancelled == [True]


def test_no_more_is_taken_from_serve_than_a_client_reads():
    taken, ended = [], []

    async def serve(_request, _context):
        try:
            while True:
                taken.append(
                    MessageBatch([inference_pb2.GenerateResponse(delta={"text": 1000 * "a"})]).SerializeToString()
                )
                yield taken[-1]
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            ended.append(True)
            raise

    async def ask(channel):
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(inference_pb2.GenerateRequest())
        await call.read()
        before = -1
        while len(taken) != before:
            before = len(taken)
            await asyncio.sleep(0.2)
        for _ in range(3 * before):  # all messages come, and room that becomes free is filled again
            assert len((await call.read()).delta.text) == 1000
        assert len(taken) > 3 * before
        call.cancel()
        while not ended:
            await asyncio.sleep(0.01)
        return before

    assert asyncio.run(asyncio.wait_for(with_proxy(serve, ask), 30)) < 10_000


@pytest.mark.parametrize("method", ["Generate", "ModelStreamInfer"])
def test_the_call_of_a_client_that_reads_nothing_ends(method, monkeypatch):
    """The call of a client that reads nothing ends.

    Without that, the client's window of about 4 MB would keep Serve's stream open as long as the connection.
    """
    monkeypatch.setattr(status, "UNREAD_SECONDS", 0.2)
    ended = asyncio.Event()
    large = "a" * 2**20

    async def serve(_request, _context):
        try:
            while True:
                await asyncio.sleep(0)
                if method == "Generate":
                    yield MessageBatch([inference_pb2.GenerateResponse(delta={"text": large})]).SerializeToString()
                else:
                    yield MessageBatch(
                        [grpc_service_pb2.ModelStreamInferResponse(error_message=large)]
                    ).SerializeToString()
        finally:
            ended.set()

    async def ask(channel):
        if method == "Generate":
            call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(inference_pb2.GenerateRequest(text="a"))
        else:
            call = grpc_service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer()
            await call.write(grpc_service_pb2.ModelInferRequest(id="1"))
        await asyncio.wait_for(ended.wait(), 20)
        call.cancel()

    asyncio.run(with_proxy(serve, ask))


def test_requests_of_a_stream_are_calls_of_their_own():
    """Each request of a stream is a call with its own model, key and status."""
    seen, open_together = [], asyncio.Barrier(4)

    async def serve(request, context):
        metadata = dict(context.invocation_metadata())
        seen.append((request.id, metadata.get("multiplexed_model_id"), len(metadata.get("session_id", ""))))
        await open_together.wait()
        response = grpc_service_pb2.ModelStreamInferResponse(infer_response={"id": request.id})
        if request.id != "refused":
            yield MessageBatch([response]).SerializeToString()
        status = ResponseStatus(grpc.StatusCode.OK)
        if request.id == "refused":
            context.set_code(grpc.StatusCode.NOT_FOUND)
            context.set_details("there is no such model")
            context.set_trailing_metadata([("grpc-status-details-bin", b"")])
            yield MessageBatch([empty_pb2.Empty()]).SerializeToString()
        elif request.id == "lost":
            status = ResponseStatus(grpc.StatusCode.INTERNAL, message="Serve's own words")
        set_grpc_code_and_details(context, status)

    def request(name, model):
        return grpc_service_pb2.ModelInferRequest(
            id=name,
            model_name=model,
            inputs=[{"name": "text_input", "datatype": "BYTES", "contents": {"bytes_contents": [b"a"]}}],
        )

    requests = [request("one", "small"), request("two", ""), request("lost", "small"), request("refused", "other")]

    async def ask(channel):
        responses = grpc_service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter(requests))
        return [(response.infer_response.id, response.error_message) async for response in responses]

    responses = asyncio.run(asyncio.wait_for(with_proxy(serve, ask), 30))
    assert sorted(seen) == [("lost", "small", 16), ("one", "small", 16), ("refused", "other", 16), ("two", None, 16)]
    assert sorted(responses) == [
        ("lost", ""),
        ("lost", "the replica that had the request was lost; send it again"),
        ("one", ""),
        ("refused", "there is no such model"),
        ("two", ""),
    ]


@pytest.mark.parametrize(
    ("code", "status"), [(grpc.StatusCode.OK, "SERVING"), (grpc.StatusCode.UNAVAILABLE, "NOT_SERVING")]
)
def test_health_is_what_serve_says(code, status):
    async def serve(request, context):
        assert isinstance(request, HealthzRequest)
        set_grpc_code_and_details(context, ResponseStatus(code, message="Serve's own words"))

    async def ask(channel):
        health = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest())
        return (await health.Check(health_pb2.HealthCheckRequest())).status, (await watch.read()).status

    assert asyncio.run(with_proxy(serve, ask)) == (health_pb2.HealthCheckResponse.ServingStatus.Value(status),) * 2
