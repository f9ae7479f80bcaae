"""Health takes the path of a request: it fails if no thread is free, the engine is stuck, or steps fail."""

import asyncio
import json
import threading
import urllib.error
import urllib.request
from contextlib import ExitStack
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sharp.kserve import grpc_service_pb2, grpc_service_pb2_grpc
from sharp.serving.api.errors import StalledError
from sharp.serving.backends.onnxruntime import OnnxRuntimeBackend
from sharp.serving.engine.model_folder import ModelFolder
from sharp.serving.frontends import health, service
from sharp.serving.frontends.admission import Pool
from sharp.serving.frontends.health import MOST_FAILED_STEPS, Health


def get(started, path):
    """Return the status and the reason of a probe over HTTP."""
    try:
        with urllib.request.urlopen(f"http://{started.http_address}{path}", timeout=20) as response:
            return response.status, ""
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["reason"]


def probes(started):
    """Return (ready, live) over HTTP, and assert that every other protocol says the same."""
    ready, live = get(started, "/health/ready")[0] == 200, get(started, "/health/live")[0] == 200
    assert (get(started, "/health")[0] == 200) == ready
    with grpc.insecure_channel(started.grpc_address) as channel:
        checked = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20).status
        kserve = grpc_service_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert (checked == health_pb2.HealthCheckResponse.SERVING) == ready
        assert kserve.ServerReady(grpc_service_pb2.ServerReadyRequest(), timeout=20).ready == ready
        assert kserve.ServerLive(grpc_service_pb2.ServerLiveRequest(), timeout=20).live == live
    return ready, live


def complete(started):
    body = json.dumps({"model": "counting", "prompt": "a", "max_tokens": 2, "temperature": 0}).encode()
    try:
        with urllib.request.urlopen(f"http://{started.http_address}/v1/completions", body, timeout=20) as response:
            return response.status
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def test_a_server_whose_threads_are_all_taken_is_not_ready_and_needs_no_restart_yet(
    start_server, counting, monkeypatch
):
    monkeypatch.setattr(health, "WAIT_SECONDS", 0.05)
    monkeypatch.setattr(health, "STARVED_SECONDS", 0.2)
    monkeypatch.setattr(service, "PREPARING_THREADS", 2)
    free = threading.Event()
    started = start_server(counting)
    assert probes(started) == (True, True)
    prepare = ModelFolder.prepare
    monkeypatch.setattr(ModelFolder, "prepare", lambda *given: free.wait(20) and prepare(*given))
    with ExitStack() as stack:
        stack.callback(free.set)
        statuses = []
        askers = [threading.Thread(target=lambda: statuses.append(complete(started))) for _ in range(2)]
        for asker in askers:
            asker.start()
        while get(started, "/health/ready")[0] == 200:  # takes at most 0.2 s
            pass
        assert probes(started) == (False, True)
        assert get(started, "/health")[1].startswith("a request would have waited for a thread for ")
        free.set()
        for asker in askers:
            asker.join(20)
        assert statuses == [200, 200]
        while get(started, "/health/ready")[0] != 200:
            pass
        assert probes(started) == (True, True)


def test_where_requests_alone_fail_the_server_stays_and_where_a_probe_fails_too_it_goes(
    start_server, counting, monkeypatch
):
    started = start_server(counting)
    step = OnnxRuntimeBackend.step

    def failing(fails):
        def run(backend, batch):
            if fails(batch):
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            return step(backend, batch)

        return run

    monkeypatch.setattr(OnnxRuntimeBackend, "step", failing(lambda batch: 97 in batch.input_ids))
    assert [complete(started) for _ in range(MOST_FAILED_STEPS)] == [500] * MOST_FAILED_STEPS
    assert probes(started) == (True, True)  # the probe's token is not 97
    monkeypatch.setattr(OnnxRuntimeBackend, "step", failing(lambda _: True))
    assert [complete(started) for _ in range(MOST_FAILED_STEPS)] == [500] * MOST_FAILED_STEPS
    assert probes(started) == (False, False)
    assert "illegal memory access" in get(started, "/health/live")[1]
    monkeypatch.setattr(OnnxRuntimeBackend, "step", step)
    assert probes(started) == (True, True)


def test_logits_that_are_never_finite_fail_health(start_server, counting, monkeypatch):
    started = start_server(counting)
    step = OnnxRuntimeBackend.step

    def spoiled(backend, batch):
        output = step(backend, batch)
        output.logits[:] = np.nan
        return output

    monkeypatch.setattr(OnnxRuntimeBackend, "step", spoiled)
    assert [complete(started) for _ in range(MOST_FAILED_STEPS)] == [500] * MOST_FAILED_STEPS
    assert probes(started) == (False, False)
    assert "logits that are not finite" in get(started, "/health/live")[1]


def test_an_engine_that_takes_nothing_from_its_queue_is_stalled(monkeypatch):
    monkeypatch.setattr(health, "WAIT_SECONDS", 0.01)

    async def check():
        from concurrent.futures import Future

        pools = Pool("parsed", 1, 1), Pool("prepared", 1, 1)
        engine = SimpleNamespace(ping=Future, failed_steps=0)
        served = SimpleNamespace(
            parsing=pools[0], preparing=pools[1], engine=engine, check_engine=lambda: None, check_serving=lambda: None
        )
        checked = Health(served, stall_seconds=0.1)
        await checked.check_live()
        with pytest.raises(StalledError, match="would have waited for the engine"):
            for _ in range(100):
                await checked.check_ready()
        for pool in pools:
            pool.close()

    asyncio.run(check())
