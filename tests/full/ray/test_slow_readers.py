"""A reader that does not read its responses is stopped by a replica under Serve, without a cluster."""

import asyncio
import json
import pickle
import time
from contextlib import aclosing
from dataclasses import replace

import grpc
import pytest
from ray.serve._private.http_util import MessageQueue
from starlette.responses import PlainTextResponse

from sharp.ray.backpressure import AHEAD, held_back, unpacked
from sharp.ray.context import ReplicaContext
from sharp.serving.engine.engine import Engine
from sharp.serving.frontends.grpc.inference import InferenceService
from sharp.serving.frontends.http.app import make_app
from sharp.serving.frontends.running import run_model
from sharp.serving.observability.metrics import Metrics
from sharp.v1 import inference_pb2
from tests.serving.conftest import SETTINGS, write_folder

LIMIT = 64
SEQUENCES = 16
TOKENS = 100
STOPPED = f"the client left {LIMIT} messages unread; the request was stopped"


@pytest.fixture(scope="module")
def counting(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("models") / "counting", hashing=0)


@pytest.fixture(autouse=True)
def slower(monkeypatch):
    """Slow the engine's steps down, so that a client that reads keeps up."""
    step = Engine.step
    monkeypatch.setattr(Engine, "step", lambda engine: (time.sleep(0.005), step(engine))[1])


class Context:
    """The part of Serve's context that replicas use."""

    def __init__(self):
        self.set = {}

    def invocation_metadata(self):
        return []

    def peer(self):
        return "ipv4:127.0.0.1:50000"

    def __getattr__(self, name):
        return lambda value: self.set.update({name.removeprefix("set_"): value})


def with_model(folder, ask, limit=LIMIT):
    """Return the result of `ask(running)` for a running model with at most `limit` unread messages."""
    settings = replace(SETTINGS, server=replace(SETTINGS.server, max_unread_messages=limit))

    async def run():
        async with run_model(folder, settings, Metrics()) as running:
            return await asyncio.wait_for(ask(running), 30)

    return asyncio.run(run())


async def stopped(running):
    """Wait until nothing runs."""
    while running.engine._engine.has_work:
        await asyncio.sleep(0.01)


async def generate(context, running):
    request = inference_pb2.GenerateRequest(
        text="a", sampling={"n": SEQUENCES}, stopping={"max_tokens": TOKENS, "ignore_eos": True}
    )
    async with aclosing(ReplicaContext(context).stream(InferenceService(running.service).Generate, request)) as batches:
        async for batch in batches:
            for message in unpacked(batch.SerializeToString()):
                yield inference_pb2.GenerateResponse.FromString(message)


def test_a_stream_that_is_not_read_is_stopped_and_says_so(counting):
    async def ask(running):
        context = Context()
        messages = generate(context, running)
        await anext(messages)
        await stopped(running)
        return context.set, [message async for message in messages]

    status, messages = with_model(counting, ask)
    assert (status["code"], status["details"]) == (grpc.StatusCode.RESOURCE_EXHAUSTED, STOPPED)
    assert len(messages) <= AHEAD + LIMIT + 1  # the last message carries the status


def test_a_stream_that_is_read_is_complete(counting):
    async def ask(running):
        context = Context()
        return context.set, [message async for message in generate(context, running)]

    status, messages = with_model(counting, ask, limit=SEQUENCES * TOKENS)
    assert "code" not in status
    assert sum(len(message.delta.token_ids) for message in messages) == SEQUENCES * TOKENS


def test_who_stops_reading_ends_what_waits_for_room(counting):
    async def ask(running):
        messages = generate(Context(), running)
        await anext(messages)
        await asyncio.sleep(0.2)
        await messages.aclose()
        await stopped(running)
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert [task for task in with_model(counting, ask) if "handed_over" in repr(task)] == []


class Http:
    """A request as a replica of Serve runs it: messages go into a queue, from which a proxy takes them."""

    def __init__(self, app, body=b"{}"):
        queue = MessageQueue()
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
        received = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive():
            return next(received, None) or await asyncio.Event().wait()

        self.call = asyncio.ensure_future(app(scope, receive, held_back(queue)))
        self._batches = queue.fetch_messages_from_queue(self.call)

    async def take(self):
        """Return the messages that a proxy takes at once, or none at the end."""
        batch = await anext(self._batches, [])
        return pickle.loads(pickle.dumps(batch))


COMPLETION = {
    "model": "counting",
    "prompt": "a",
    "n": SEQUENCES,
    "max_tokens": TOKENS,
    "ignore_eos": True,
    "stream": True,
}


def test_an_http_stream_that_is_not_read_is_stopped_and_says_so(counting):
    async def ask(running):
        request = Http(make_app(running, Metrics(), 1000), json.dumps(COMPLETION).encode())
        batches = [await request.take()]
        await stopped(running)
        while batches[-1]:
            batches.append(await request.take())
        return [message for batch in batches for message in batch]

    messages = with_model(counting, ask)
    assert {type(message) for message in messages} == {dict}
    assert messages[0]["status"] == 200
    assert len(messages) <= AHEAD + LIMIT + 4  # the start, the error, the end, and one message that waited for room
    assert STOPPED.encode() in messages[-2]["body"]
    assert not messages[-1]["more_body"]


@pytest.mark.parametrize("taken", [True, False])
def test_http_goes_on_when_messages_are_taken(taken):
    """An HTTP response goes on while its messages are taken, with or without pickling.

    Serve also runs servers in its replicas, beside its proxies, which pickle nothing.
    """

    async def app(_scope, _receive, send):
        for _ in range(3 * AHEAD):
            await send({"type": "http.response.body", "body": b"a", "more_body": True})

    async def ask():
        if not taken:
            await app({}, None, held_back(lambda _message: asyncio.sleep(0)))
            return 3 * AHEAD
        request, count = Http(app), 0
        while batch := await request.take():
            count += len(batch)
            assert len(batch) <= AHEAD
        return count

    assert asyncio.run(asyncio.wait_for(ask(), 10)) == 3 * AHEAD


def test_a_plain_response_needs_no_reader():
    async def ask():
        request = Http(PlainTextResponse("a"))
        await request.call
        return [message["type"] for message in await request.take()]

    assert asyncio.run(ask()) == ["http.response.start", "http.response.body"]
