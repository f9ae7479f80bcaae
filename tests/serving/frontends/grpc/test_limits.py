"""Messages that never come, are too large or are invalid, and too many calls, all end with a sentence."""

import threading
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sharp.kserve import grpc_service_pb2 as kserve
from sharp.serving.frontends.grpc import limits
from sharp.serving.frontends.grpc.messages import UNREADABLE
from sharp.v1 import control_pb2, inference_pb2
from tests.serving.grpc_client import Client, status

EXHAUSTED, INVALID = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT
GENERATE, INFER = "/sharp.v1.InferenceService/Generate", "/inference.GRPCInferenceService/ModelInfer"
LIMIT = 2**20 + 48 * 128


@pytest.fixture
def start(start_server, counting, server_settings):
    return lambda **server: start_server(counting, server=replace(server_settings.server, **server)).grpc_address


def health(address):
    with grpc.insecure_channel(address) as channel:
        return health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10).status


class Unsent:
    """A call whose message never comes."""

    def __init__(self, address, method=GENERATE):
        self._end = threading.Event()
        self._channel = grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        self.call = self._channel.stream_stream(method)(self._messages(), timeout=20)

    def _messages(self):
        self._end.wait(20)
        yield from ()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._end.set()
        self._channel.close()


def test_a_message_that_does_not_come_ends_its_call(start):
    with Unsent(start(body_seconds=0.2)) as unsent:
        assert status(lambda: list(unsent.call)) == (INVALID, "the message of the call did not come within 0.2 s")


def test_a_message_that_does_not_come_gives_way_to_others(start, monkeypatch):
    monkeypatch.setattr(limits, "PATIENCE_SECONDS", 0.1)
    address = start(max_buffered_bytes=2**20)  # room for 16 messages at once
    with ExitStack() as stack:
        unsent = [stack.enter_context(Unsent(address)) for _ in range(16)]
        client = stack.enter_context(client_of(address))
        for _ in range(20):
            assert list(client.stream(max_tokens=2))
        assert health(address) == health_pb2.HealthCheckResponse.SERVING
    assert unsent


@contextmanager
def client_of(address):
    client = Client(address)
    yield client
    client.channel.close()


@pytest.mark.parametrize("method", [GENERATE, INFER])
def test_a_message_that_is_none_is_refused_in_a_sentence(start, caplog, method):
    with grpc.insecure_channel(start()) as channel:
        for junk in (b"\xff" * 10, b"\xff" * 100_000):
            refused = status(lambda junk=junk: list(channel.unary_stream(method)(junk, timeout=10)))
            assert refused == (INVALID, UNREADABLE)
    assert not [record for record in caplog.records if record.exc_info]


def test_the_size_of_a_message_is_bounded_by_what_its_method_needs(start):
    address = start()
    client = Client(address)
    large = control_pb2.AbortRequest(request_id="x" * 2**17)
    assert status(lambda: client.control.Abort(large))[0] == INVALID
    tokens = inference_pb2.TokenIds(ids=[200] * (LIMIT // 2))
    code, message = status(lambda: list(client.inference.Generate(inference_pb2.GenerateRequest(token_ids=tokens))))
    assert (code, "larger than max" in message) == (EXHAUSTED, True)
    request = kserve.ModelInferRequest(model_name="counting", raw_input_contents=[b"a" * LIMIT])
    call = client.channel.unary_unary(INFER, kserve.ModelInferRequest.SerializeToString)
    assert status(lambda: call(request, timeout=10))[0] == EXHAUSTED
    assert list(client.stream(max_tokens=2))
    client.channel.close()


def test_calls_are_counted_and_health_is_not(start, monkeypatch):
    address = start()
    with client_of(address) as client:
        with monkeypatch.context() as patch:
            patch.setattr(limits, "MOST_CALLS", 0)
            refused = (EXHAUSTED, "0 calls run, the limit; try again in 1 s")
            assert status(lambda: list(client.stream(max_tokens=2))) == refused
            with Unsent(address, "/inference.GRPCInferenceService/ModelStreamInfer") as streaming:
                assert status(lambda: list(streaming.call)) == refused
            assert health(address) == health_pb2.HealthCheckResponse.SERVING
        monkeypatch.setattr(limits, "MOST_CALLS", 1)
        for _ in range(3):  # each call has left the count when it ended
            assert list(client.stream(max_tokens=2))


def test_the_connections_of_a_port_are_bounded(start):
    address = start(max_connections=3)
    with ExitStack() as stack:
        ready = 0
        for _ in range(8):
            channel = stack.enter_context(grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]))
            try:
                grpc.channel_ready_future(channel).result(timeout=0.5)
            except grpc.FutureTimeoutError:
                continue
            ready += 1
        assert ready <= 3
