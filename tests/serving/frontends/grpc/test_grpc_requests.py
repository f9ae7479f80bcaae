"""Requests of `sharp.v1` with each field, and the errors of refused requests."""

import asyncio
import json
import math
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from sharp import SamplingParams
from sharp.serving.api.errors import DrainingError, QueueFullError
from sharp.serving.api.request import GenerateRequest
from sharp.serving.client import Client as SharpClient
from sharp.serving.config import EngineConfig, ServerConfig
from sharp.serving.frontends.running import run_model
from sharp.serving.observability.metrics import Metrics
from sharp.serving.observability.request_record import RequestOrigin
from sharp.v1 import control_pb2, inference_pb2
from tests.serving.grpc_client import Client, status
from tests.serving.running_server import serve_while


def text_of(messages, index=0):
    return "".join(message.delta.text for message in messages if message.delta.index == index)


def test_a_stream_ends_after_the_last_of_n_sequences(client):
    messages = list(
        client.stream(sampling={"temperature": 3, "seed": 1, "n": 3}, stopping={"max_tokens": 5, "ignore_eos": True})
    )
    finished = [message.finished for message in messages if message.HasField("finished")]
    assert sorted(end.index for end in finished) == [0, 1, 2]
    assert [end.last for end in finished] == [False, False, True]
    assert messages[-1].HasField("finished")
    assert len({text_of(messages, index) for index in range(3)}) == 3
    assert [end.usage.completion_tokens for end in finished] == [5, 5, 5]


def test_logprobs_of_completion_and_prompt(client):
    messages = list(client.stream("abc", max_tokens=2, response={"logprobs": 2, "prompt_logprobs": 0}))
    # The counting model gives the right token the logit 4 and the 256 other tokens the logit 0.
    likely = 4 - math.log(math.exp(4) + 256)
    prompt = messages[0].prompt_info.prompt_logprobs
    assert [(entry.token_id, len(entry.top)) for entry in prompt] == [(98, 0), (99, 0)]
    assert [entry.logprob for entry in prompt] == pytest.approx([likely, likely], abs=1e-5)
    entries = [entry for message in messages for entry in message.delta.logprobs]
    assert [(entry.token_id, entry.top[0].token_id, len(entry.top)) for entry in entries] == [
        (100, 100, 2),
        (101, 101, 2),
    ]
    assert [entry.top[0].logprob for entry in entries] == pytest.approx([likely, likely], abs=1e-5)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"sampling": {"temperature": 0, "logit_bias": {120: 100}}}, "xxxx"),
        ({"sampling": {"temperature": 3, "top_k": 1}}, "bcde"),
        ({"sampling": {"temperature": 0, "top_k": -1}}, "bcde"),
        ({"sampling": {"temperature": 3, "min_p": 1}}, "bcde"),
        ({"sampling": {"temperature": 0, "repetition_penalty": 1.5, "presence_penalty": 1}}, "bcde"),
        ({"stopping": {"stop": ["c"], "min_tokens": 4, "max_tokens": 4}}, "bcde"),
        ({"stopping": {"stop": ["cd"], "include_stop_str_in_output": True}}, "bcd"),
        ({"guided": {"regex": "[xyz]{2}"}, "text": "w"}, "xy"),
        ({"guided": {"json": json.dumps({"const": 12})}}, "12"),
        ({"guided": {"grammar": 'start: "no" | "yes"'}, "text": "m"}, "no"),
    ],
)
def test_what_shapes_the_completion(client, fields, text):
    fields = {"stopping": {"max_tokens": 4}, **fields}
    assert client.generate(fields.pop("text", "a"), **fields)[0] == text


def test_a_time_limit_ends_the_completion_with_what_there_is(client, steps):
    text, finished = client.generate(stopping={"time_limit_ms": 150})
    assert finished.reason == inference_pb2.FINISH_REASON_TIME_LIMIT
    assert 0 < len(text) < 127


def test_cached_tokens_are_those_of_the_same_salt(connect, counting):
    client = connect(counting)

    def cached(salt):
        messages = list(client.stream("x" * 41, max_tokens=1, cache_salt=salt))
        assert messages[-1].finished.usage.cached_tokens == messages[0].prompt_info.cached_tokens
        return messages[0].prompt_info.cached_tokens

    assert [cached("a"), cached("a"), cached("b")] == [0, 40, 0]
    without = connect(counting, engine=EngineConfig(prefix_cache=False))
    assert [next(without.stream("x" * 41)).prompt_info.cached_tokens for _ in range(2)] == [0, 0]


def test_the_lower_priority_number_goes_first(connect, counting, steps):
    client = connect(counting, engine=EngineConfig(max_sequences=1))
    first = client.stream(max_tokens=20)
    next(first)
    ended = []

    def ask(priority):
        client.generate(max_tokens=2, priority=priority)
        ended.append(priority)

    with ThreadPoolExecutor(2) as pool:
        late = pool.submit(ask, 5)
        wait_until_waiting(client, 1)
        pool.submit(ask, -5).result(10)
        late.result(10)
    list(first)
    assert ended == [-5, 5]


def wait_until_waiting(client, count):
    for _ in range(1000):
        load = client.control.GetLoad(control_pb2.GetLoadRequest())
        if load.requests_waiting == count:
            return load
    raise AssertionError(load)


def test_load_and_the_request_id_before_the_prompt_is_read(connect, counting, steps):
    client = connect(counting, engine=EngineConfig(max_sequences=1))
    assert client.control.GetLoad(control_pb2.GetLoadRequest()) == control_pb2.GetLoadResponse()
    running = client.stream(max_tokens=100)
    next(running)
    waiting = client.stream(request_id="mine", max_tokens=100)
    assert dict(waiting.initial_metadata())["sharp-request-id"] == "mine"
    load = wait_until_waiting(client, 1)
    assert (load.requests_running, load.draining) == (1, False)
    assert 0 < load.cache_usage_ratio < 1
    client.control.Abort(control_pb2.AbortRequest(request_id="mine"))
    info, finished = list(waiting)
    assert (info.prompt_info.prompt_tokens, info.prompt_info.HasField("cached_tokens")) == (1, False)
    assert finished.finished.reason == inference_pb2.FINISH_REASON_CANCELLED
    running.cancel()


def details(call, kind):
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    found = kind()
    assert rpc_status.from_call(caught.value).details[0].Unpack(found)
    return caught.value.code(), found


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"sampling": {"min_p": 2}}, "sampling.min_p"),
        ({"sampling": {"n": 0}}, "sampling.n"),
        ({"stopping": {"time_limit_ms": 0}}, "stopping.time_limit_ms"),
        ({"response": {"logprobs": 21}}, "response.logprobs"),
        ({"guided": {"regex": "("}}, "guided.regex"),
        ({"guided": {}}, "guided"),
        ({"cache_salt": "x" * 300}, "cache_salt"),
        ({"text": ""}, "prompt"),
        ({"request_id": "x" * 300}, "request_id"),
    ],
)
def test_a_bad_field_is_named(client, fields, path):
    code, found = details(client.stream(**fields), error_details_pb2.BadRequest)
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert [violation.field for violation in found.field_violations] == [path]
    assert path.rpartition(".")[2] in found.field_violations[0].description


def test_a_full_queue_says_when_to_come_back(connect, counting, steps):
    client = connect(counting, engine=EngineConfig(max_sequences=1, max_waiting_requests=1))
    running = client.stream(max_tokens=100)
    next(running)
    waiting = client.stream(max_tokens=100)
    waiting.initial_metadata()
    code, found = details(client.stream(), error_details_pb2.RetryInfo)
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert 100 <= found.retry_delay.ToMilliseconds() <= 60000
    with pytest.raises(QueueFullError) as caught:
        list(SharpClient(client.address, attempts=1).stream("a"))
    assert caught.value.retry_after >= 0.1
    running.cancel(), waiting.cancel()


def test_a_server_that_ends_finishes_what_runs_and_takes_no_more(counting, server_settings, steps):
    settings = replace(server_settings, server=ServerConfig(grpc_port=0, http_port=0, grace_seconds=20))

    def use(started, stop):
        client = Client(started.grpc_address)
        running = client.stream(max_tokens=40)
        next(running)
        stop()
        for _ in range(1000):
            if client.control.GetLoad(control_pb2.GetLoadRequest()).draining:
                break
        refused = status(lambda: list(client.stream()))
        return refused, list(running)[-1].finished.reason

    refused, reason = serve_while(counting, settings, use)
    assert refused == (grpc.StatusCode.UNAVAILABLE, "the server ends and takes no more requests; ask another one")
    assert reason == inference_pb2.FINISH_REASON_LENGTH


def test_what_takes_longer_than_a_server_waits_is_cancelled_and_told_so(counting, server_settings, steps, caplog):
    def use(started, stop):
        stream = Client(started.grpc_address).stream(max_tokens=120)
        next(stream)
        body = {"model": "counting", "prompt": "a", "max_tokens": 120, "temperature": 0, "stream": True}
        request = urllib.request.Request(f"http://{started.http_address}/v1/completions", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=20) as response:
            response.readline()
            stop()
            return list(stream)[-1].finished.reason, response.read()

    reason, body = serve_while(counting, server_settings, use)
    assert reason == inference_pb2.FINISH_REASON_CANCELLED
    assert body.endswith(b"data: [DONE]\n\n")
    assert not [record for record in caplog.records if record.exc_info]


def test_a_text_that_is_read_for_longer_than_a_server_waits_is_refused(counting, server_settings):
    async def serve():
        async with run_model(counting, server_settings, Metrics()) as running:
            released = threading.Event()

            def prepare():
                assert released.wait(10)
                return running.model.prepare(GenerateRequest("a", SamplingParams(max_tokens=2), request_id="late"))

            async def ask():
                async with running.service.stream(RequestOrigin("grpc"), prepare) as stream:
                    return [event async for event in stream]

            asked = asyncio.create_task(ask())
            await asyncio.sleep(0)  # let the request begin
            await running.service.drain(0)
            released.set()
            with pytest.raises(DrainingError):
                await asked

    asyncio.run(serve())
