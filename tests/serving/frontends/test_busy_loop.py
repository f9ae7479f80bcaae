"""Large responses do not block the event loop, and health is right while the loop or the engine is busy."""

import asyncio
import json
import threading
import urllib.error
import urllib.request
from types import SimpleNamespace
from unittest.mock import AsyncMock

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sharp.kserve import grpc_service_pb2, grpc_service_pb2_grpc
from sharp.serving.api.completion import Completion
from sharp.serving.api.events import FinishReason, PromptComputed, Timing, TokenLogprobs, Usage
from sharp.serving.api.sampling_params import SamplingParams
from sharp.serving.engine.thread import EngineThread
from sharp.serving.frontends.grpc.inference import InferenceService
from sharp.serving.frontends.http import sending
from sharp.serving.frontends.http.openai_response import ChatResponse, Extras
from sharp.serving.frontends.http.token_texts import TokenTexts
from sharp.serving.frontends.service import GenerationService
from sharp.serving.server import grpc_server as server
from sharp.serving.text.chat_forms import MessageParser
from tests.serving.grpc_client import status
from tests.serving.running_engine import prepared

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def started(start_server, counting, monkeypatch):
    monkeypatch.setattr(server, "HEALTH_SECONDS", 3600)  # so that no probe depends on an update that comes just in time
    return start_server(counting)


def check(started, seconds=10):
    with grpc.insecure_channel(started.grpc_address) as channel:
        return health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=seconds).status


def ready(started, seconds=10):
    with grpc.insecure_channel(started.grpc_address) as channel:
        stub = grpc_service_pb2_grpc.GRPCInferenceServiceStub(channel)
        return stub.ServerReady(grpc_service_pb2.ServerReadyRequest(), timeout=seconds).ready


def http(started, seconds=10):
    """Return the HTTP status of /health."""
    try:
        with urllib.request.urlopen(f"http://{started.http_address}/health", timeout=seconds) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


def test_no_probe_says_that_a_server_serves_whose_event_loop_is_blocked(started, monkeypatch):
    blocked, released = threading.Event(), threading.Event()

    def block(_service, _model):
        blocked.set()
        assert released.wait(20)

    with monkeypatch.context() as patch:
        patch.setattr(GenerationService, "check_model", block)
        url = f"http://{started.http_address}/v1/models/counting"
        asking = threading.Thread(target=lambda: urllib.request.urlopen(url, timeout=20).close())
        asking.start()
        assert blocked.wait(10)
        try:
            for probe in (check, ready):
                assert status(lambda probe=probe: probe(started, 0.2))[0] == grpc.StatusCode.DEADLINE_EXCEEDED
            with pytest.raises(TimeoutError):
                http(started, 0.2)
        finally:
            released.set()
            asking.join(20)
    assert (check(started), ready(started), http(started)) == (SERVING, True, 200)


def test_a_probe_tells_of_the_engine_as_it_is_now(started, monkeypatch):
    assert (check(started), ready(started), http(started)) == (SERVING, True, 200)
    with monkeypatch.context() as patch:
        patch.setattr(EngineThread, "seconds_in_step", property(lambda _: 1e9))
        assert (check(started), ready(started), http(started)) == (NOT_SERVING, False, 503)
    assert (check(started), ready(started), http(started)) == (SERVING, True, 200)


def test_a_probe_that_is_given_up_leaves_no_old_news():
    """A probe that its client gives up leaves no outdated status.

    The client's deadline can end a probe while a watcher is being notified.
    """
    service = SimpleNamespace(serving=True)

    async def ready():
        return service.serving

    service.health = SimpleNamespace(ready=ready)
    grpc_server = server.GrpcServer.__new__(server.GrpcServer)
    grpc_server._service, grpc_server._serving = service, None
    grpc_server._health = health = server._Health(grpc_server._update_health)
    request = health_pb2.HealthCheckRequest()
    writing, free = asyncio.Event(), asyncio.Event()

    async def write(response):
        if response.status == NOT_SERVING:
            writing.set()
            await free.wait()

    async def probe():
        return (await health.Check(request, AsyncMock())).status

    async def run():
        assert await probe() == SERVING
        watching = asyncio.create_task(health.Watch(request, SimpleNamespace(write=write)))
        await asyncio.sleep(0)
        service.serving = False
        assert await probe() == NOT_SERVING
        await writing.wait()
        service.serving = True
        given_up = asyncio.create_task(probe())
        await asyncio.sleep(0)
        given_up.cancel()
        free.set()
        assert await probe() == SERVING
        watching.cancel()

    asyncio.run(run())


MANY = 4000
FEW = 8  # turns of an event loop that is always busy; Python's threads switch every 5 ms
LOGPROBS = (TokenLogprobs(97, -1.0, tuple((97 + place, -1.0) for place in range(20))),) * MANY


def turns(work):
    """Return how many turns the event loop made while `work` was done."""

    async def run():
        count = 0

        async def tick():
            nonlocal count
            while True:
                await asyncio.sleep(0)
                count += 1

        ticking = asyncio.create_task(tick())
        await work
        ticking.cancel()
        return count

    return asyncio.run(run())


def test_while_a_large_body_is_written_the_event_loop_goes_on():
    completion = Completion(
        "a" * MANY, (97,) * MANY, FinishReason.LENGTH, None, Usage(1, MANY), Timing(0, 0, 0), None, LOGPROBS
    )
    sent = []

    async def send(message):
        sent.append(message)

    extras = Extras(token_ids=True, prompts=[(97,) * MANY])
    response = ChatResponse("1", "m", TokenTexts(None), extras, MessageParser)
    assert turns(sending.send_whole(response, [completion], {}, send)) > FEW
    body = b"".join(message.get("body", b"") for message in sent)
    assert len(json.loads(body)["choices"][0]["logprobs"]["content"]) == MANY
    assert dict(sent[0]["headers"])[b"content-length"] == str(len(body)).encode()
    assert max(len(message.get("body", b"")) for message in sent) == sending.PIECE_BYTES


class Computed:
    """The events of a request whose prompt is computed."""

    request = prepared("1", (97,), SamplingParams(prompt_logprobs=20), 1)

    def __init__(self):
        self.headers = {}
        self._events = iter((PromptComputed("1", 0, (), LOGPROBS),))

    def __aiter__(self):
        return self

    async def __anext__(self):
        event = next(self._events, None)
        if event is None:
            raise StopAsyncIteration
        return event


def test_while_the_logprobs_of_a_prompt_are_written_the_event_loop_goes_on():
    model = SimpleNamespace(manifest=SimpleNamespace(name="m"))
    context = AsyncMock()
    service = InferenceService(SimpleNamespace(model=model))
    assert turns(service._send(Computed(), context)) > FEW
    (message,) = context.write.call_args.args
    assert len(message.prompt_info.prompt_logprobs) == MANY
