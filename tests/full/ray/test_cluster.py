"""The engine on a cluster of Ray, through the usual client, also when replicas and nodes are lost or replaced."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from sharp import Client
from sharp.kserve import grpc_service_pb2, grpc_service_pb2_grpc
from sharp.serving.api.errors import FieldError, NotFoundError, SharpError
from sharp.v1 import inference_pb2, inference_pb2_grpc
from tests.full.ray.conftest import DRAIN_SECONDS, MODELS, REPLICAS, ROOT, wait_for
from tests.full.ray.slow_server import STEP_SECONDS
from tests.full.ray.streams import Streams, greedy
from tests.serving.conftest import greedy_hashing

STREAMS = 50
TOKENS = 60
LONG = 90
SAMPLES = 16


@pytest.fixture(scope="module")
def client(sharp):
    with Client(sharp.address) as connected:
        yield connected


def test_it_responds_as_a_server_does(client):
    events = [*client.stream("a", greedy(8))]
    assert "".join(event.text for event in events[:-1]) == "bcdefghi"
    assert len(events) == 9
    assert events[-1].usage.completion_tokens == 8
    assert client.tokenize("abc") == (97, 98, 99)
    assert client.server_info().models == ["counting"]
    assert client.server_info().threads == 1
    assert client.model_info().name == "counting"
    assert client.load().requests_running == 0


def test_it_refuses_as_a_server_does(client):
    with pytest.raises(FieldError, match="ids 0 to 256") as caught:
        client.generate([300], greedy(1))
    assert caught.value.field == "prompt"
    with pytest.raises(FieldError, match="2500000"):  # 5 MB, the most that a server takes on every way
        client.generate([200] * 2_500_000, greedy(1))
    with pytest.raises(NotFoundError, match="the cluster has counting, hashing"):
        client.tokenize("a", model="other")
    with pytest.raises(NotFoundError, match="'some-id' does not run in this cluster"):
        client.abort("some-id")
    with pytest.raises(FieldError, match="request_id is not set"):
        client.abort("")


def test_a_request_is_ended_by_its_id_wherever_it_runs(sharp, client):
    """Abort ends a request on any replica.

    Three requests are aborted, so that Abort also reaches replicas that do not have the request.
    """
    streams = {name: client.stream(f"{name} !", greedy(LONG), request_id=name) for name in ("one", "two", "three")}
    for stream in streams.values():
        next(stream)
    for name, stream in streams.items():
        client.abort(name)
        *_, last = stream
        assert (last.reason, last.usage.completion_tokens < LONG) == ("cancelled", True)
    assert sharp.running() == 0


def test_the_request_id_is_in_the_initial_metadata(sharp):
    with grpc.insecure_channel(sharp.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for given in ("", "mine"):
            call = stub.Generate(
                inference_pb2.GenerateRequest(text="a", request_id=given or None, stopping={"max_tokens": 1})
            )
            told = dict(call.initial_metadata())["sharp-request-id"]
            assert told == next(iter(call)).prompt_info.request_id
            assert told == given or (not given and len(told) == 32)


def test_health_is_that_of_the_proxy(sharp):
    with grpc.insecure_channel(sharp.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "sharp.v1.InferenceService", "inference.GRPCInferenceService"):
            response = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
            assert response.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as caught:
            health.Check(health_pb2.HealthCheckRequest(service="other"), timeout=10)
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=10)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        (told,) = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([asked]), timeout=10)
        assert {"sharp.v1.InferenceService", "inference.GRPCInferenceService"} <= {
            service.name for service in told.list_services_response.service
        }


def test_two_models_on_one_replica(sharp, client):
    """One replica serves two models: it holds one model, and loads the requested model in its place."""
    prompt = [5, 6, 7]
    for _ in range(2):
        assert list(client.generate(prompt, greedy(4), model="hashing").token_ids) == greedy_hashing(prompt, 4)
        assert client.model_info(model="hashing").name == "hashing"
        # Without a model any replica may respond, also the one that has just replaced its model.
        texts = [client.generate(f"{number} a", greedy(2)).text for number in range(4)]
        assert texts == ["bc"] * 4
    assert sum(replica.total("sharp_requests_total", "hashing") for replica in sharp.replicas()) == 2
    assert sum(replica.total("sharp_requests_running", "hashing") for replica in sharp.replicas()) == 0


def test_the_index_has_every_model(sharp):
    with grpc.insecure_channel(sharp.address) as channel:
        stub = grpc_service_pb2_grpc.GRPCInferenceServiceStub(channel)
        index = stub.RepositoryIndex(grpc_service_pb2.RepositoryIndexRequest(), timeout=30)
    assert [model.name for model in index.models] == list(MODELS)


def test_triton_clients_are_served(sharp):
    program = ROOT / "tests" / "serving" / "frontends" / "kserve" / "triton_client.py"
    result = subprocess.run([sys.executable, program, sharp.address], capture_output=True, timeout=90, check=True)
    got = json.loads(result.stdout)
    assert got["ready"] == [True, True, True]
    assert (got["server"], got["metadata"]["name"]) == ("sharp", "counting")
    assert (got["whole"], got["without_input"], got["parameters"]) == ("abcde", "bcde", "abc")
    parts = [(text, final) for name, text, final, _ in got["stream"] if name == "parts"]
    assert parts == [("b", False), ("c", False), ("d", False), ("", True)]
    assert [text for name, text, _, _ in got["stream"] if name == "whole"] == ["klmn"]
    assert [error for *_, error in got["stream"] if error] == ["prompt has 0 tokens; it must have at least 1"]
    assert got["no_model"][0] == "StatusCode.NOT_FOUND"
    assert got["bad_value"] == [
        "StatusCode.INVALID_ARGUMENT",
        "top_p is 2.0; it must be a number more than 0 and at most 1",
    ]


def test_http_streams(sharp):
    body = {"model": "counting", "prompt": "a", "max_tokens": 4, "temperature": 0, "stream": True}
    address = f"http://127.0.0.1:{sharp.http_port}/v1/completions"
    request = urllib.request.Request(address, json.dumps(body).encode(), {"content-type": "application/json"})
    times, texts = [], []
    with urllib.request.urlopen(request, timeout=20) as response:
        for line in response:
            if line.startswith(b"data: {"):
                times.append(time.monotonic())
                texts.append(json.loads(line[6:])["choices"][0]["text"])
    assert "".join(texts) == "bcde"
    assert times[3] - times[0] > 2 * STEP_SECONDS  # the tokens came one after the other


def test_the_same_beginning_goes_to_the_same_replica(sharp, client):
    def totals():
        return {
            replica.name: (replica.total("sharp_requests_total"), replica.total("sharp_prefix_cache_hits_total"))
            for replica in found
        }

    found, beginning = sharp.replicas(), [*range(64)]
    before = totals()
    for own in range(6):
        assert list(client.generate([*beginning, 100 + own], greedy(1)).token_ids) == [101 + own]
    after = totals()
    assert len(found) == REPLICAS
    gained = [(after[name][0] - before[name][0], after[name][1] - before[name][1]) for name in after]
    assert sorted(gained) == [*[(0, 0)] * (REPLICAS - 1), (6, 5 * 64)]


def test_who_leaves_ends_the_request(sharp, client):
    stream = client.stream("leaving !", greedy(TOKENS))
    next(stream)
    assert sharp.running() == 1
    stream.close()
    wait_for(lambda: sharp.running() == 0, TOKENS * STEP_SECONDS / 2)


def generated(sharp):
    return sum(replica.total("sharp_generated_tokens_total") for replica in sharp.replicas())


def test_who_does_not_read_holds_nobody_up_and_leaves_nothing(sharp, client):
    """A client that does not read delays no other client, and leaves no request behind.

    `test_slow_readers` shows how such a client is stopped. Here gRPC buffers some megabytes before anyone waits.
    """
    body = json.dumps({"model": "counting", "prompt": "a", "n": SAMPLES, "max_tokens": LONG, "stream": True})
    request = inference_pb2.GenerateRequest(text="a", sampling={"n": SAMPLES}, stopping={"max_tokens": LONG})
    before = generated(sharp)
    with grpc.insecure_channel(sharp.address) as channel, socket.socket() as http:
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(request)
        next(call)
        http.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        http.connect(("127.0.0.1", sharp.http_port))
        http.sendall(f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
        wait_for(lambda: sharp.ongoing() == 2 and generated(sharp) > before + 4 * SAMPLES)
        assert client.generate("b", greedy(2)).text == "cd"
        call.cancel()
    wait_for(lambda: sharp.ongoing() == sharp.running() == 0)
    assert generated(sharp) < before + 2 * LONG * SAMPLES


def test_streams_of_a_lost_replica_and_a_lost_node_fail_and_can_be_sent_again(sharp, client):
    streams = Streams(client, dict.fromkeys(range(STREAMS), TOKENS), again=client)
    wait_for(lambda: sharp.running() == STREAMS)
    large, small = (node.node_id for node in sharp.nodes)
    (on_small,) = (replica for replica in sharp.replicas() if replica.node == small)
    killed = next(replica for replica in sharp.replicas() if replica.node == large)
    lost = on_small.running() + killed.running()
    os.kill(killed.pid, signal.SIGKILL)
    sharp.cluster.remove_node(sharp.nodes[1], allow_graceful=False)
    streams.join()
    assert len(streams.failed) == lost
    assert 0 < lost < STREAMS
    assert {error.retry_after for error in streams.failed.values()} == {1.0}
    assert "send it again" in str(next(iter(streams.failed.values())))
    wait_for(lambda: sharp.statuses() == {"RUNNING": REPLICAS})
    assert [replica.node for replica in sharp.replicas()] == [large] * REPLICAS


def test_a_drain_ends_within_its_limit(sharp, client):
    before = sharp.replicas()
    streams = Streams(client, dict(enumerate([8, LONG] * 8)))
    wait_for(lambda: sharp.running() + len(streams.completions) >= 16)  # a short stream may have ended
    began = time.monotonic()
    sharp.deploy(num_replicas=1)
    wait_for(lambda: len(sharp.replicas()) == 1)
    assert time.monotonic() - began < DRAIN_SECONDS + 5  # the time that Serve's controller and a busy machine take
    (left,) = sharp.replicas()
    assert left in before
    streams.join()
    # The short streams had enough time to end on every replica.
    assert {streams.lengths[number] for number in streams.failed} == {LONG}


def test_replicas_follow_the_queue(sharp, client):
    scaling = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 2}
    delays = {"upscale_delay_s": 0, "metrics_interval_s": 0.2, "look_back_period_s": 1, "downscale_delay_s": 600}
    sharp.deploy(num_replicas=None, autoscaling_config={**scaling, **delays})
    assert sharp.statuses() == {"RUNNING": 1}
    streams = Streams(client, dict.fromkeys(range(12), TOKENS // 2))
    wait_for(lambda: sharp.statuses() == {"RUNNING": 2})
    streams.join()
    assert streams.failed == {}


def test_a_rolling_restart_loses_nothing(sharp, client):
    before, stop = {replica.name for replica in sharp.replicas()}, threading.Event()
    completions, failures = [], []

    def ask():
        while not stop.is_set() and len(completions) < 1000:
            try:
                completions.append(client.generate("a", greedy(8)).text)
            except SharpError as error:
                failures.append(error)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        sharp.deploy(num_replicas=2, version="2")
        wait_for(lambda: sharp.statuses() == {"RUNNING": 2})
    finally:
        stop.set()
    for thread in threads:
        thread.join(30)
    assert failures == []
    assert set(completions) == {"bcdefghi"}
    after = {replica.name for replica in sharp.replicas()}
    assert len(after) == 2
    assert not after & before
