"""`sharp_refusals_total` counts requests that end with an error by protocol, status and reason."""

import json
import urllib.error
import urllib.request
from dataclasses import replace

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from sharp.kserve import grpc_service_pb2, grpc_service_pb2_grpc
from sharp.serving.api import errors
from sharp.serving.api.errors import SharpError
from sharp.serving.config import EngineConfig
from sharp.serving.frontends.grpc.status import CODES
from sharp.serving.frontends.http.errors import STATUSES
from sharp.serving.observability.refusals import FLOODS, OTHER, REASONS
from sharp.v1 import inference_pb2, inference_pb2_grpc

TOKEN = "a-token-of-this-test"


@pytest.fixture
def served(start_server, counting, server_settings, tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text(TOKEN + "\n")
    tokens.chmod(0o600)
    engine = EngineConfig(max_sequences=1, max_waiting_requests=1)
    return start_server(counting, server=replace(server_settings.server, token_file=tokens), engine=engine)


def refusals(served):
    """Return the number of refused requests by (protocol, status, reason), without those that are 0."""
    with urllib.request.urlopen(f"http://{served.http_address}/metrics", timeout=20) as response:
        families = text_string_to_metric_families(response.read().decode())
        samples = [sample for family in families for sample in family.samples if sample.name == "sharp_refusals_total"]
    assert {sample.labels["model"] for sample in samples} == {"counting"}
    found = {tuple(sample.labels[name] for name in ("protocol", "status", "reason")): sample for sample in samples}
    assert set(FLOODS) <= set(found)
    return {labels: sample.value for labels, sample in found.items() if sample.value}


def ask(served, path, body, token=TOKEN):
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    request = urllib.request.Request(f"http://{served.http_address}{path}", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


def call(served, text, token=TOKEN, **more):
    """Return the status of a call of `Generate`."""
    metadata = [("authorization", f"Bearer {token}")] if token else []
    with grpc.insecure_channel(served.grpc_address) as channel:
        request = inference_pb2.GenerateRequest(text=text, **more)
        try:
            list(inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=20, metadata=metadata))
        except grpc.RpcError as error:
            return error.code().name
    return "OK"


def test_refused_requests_are_counted(served):
    completion = {"model": "counting", "prompt": "a", "max_tokens": 2}
    assert ask(served, "/v1/completions", completion) == 200
    assert call(served, "a", stopping={"max_tokens": 2}) == "OK"
    assert refusals(served) == {}  # a request that is served is no refusal

    assert [ask(served, "/v1/completions", completion, token) for token in (None, "wrong")] == [401, 401]
    assert ask(served, "/v1/completions", completion | {"max_tokens": -1}) == 400
    assert ask(served, "/v1/completions", completion | {"model": "another"}) == 404
    assert ask(served, "/v1/completions", completion | {"prompt": "a" * 5000}) == 400
    assert ask(served, "/v2/models/counting/generate", {"text_input": "a"}, None) == 401
    assert call(served, "a", "wrong") == "UNAUTHENTICATED"
    assert call(served, "a", sampling={"temperature": -1}) == "INVALID_ARGUMENT"
    with grpc.insecure_channel(served.grpc_address) as channel:
        stub = grpc_service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError):
            stub.ModelInfer(grpc_service_pb2.ModelInferRequest(model_name="counting"), timeout=20)
    assert refusals(served) == {
        ("http", "401", "unauthenticated"): 2,
        ("http", "400", "invalid"): 1,
        ("http", "400", "context_length"): 1,
        ("http", "404", "not_found"): 1,
        ("kserve-http", "401", "unauthenticated"): 1,
        ("grpc", "UNAUTHENTICATED", "unauthenticated"): 1,
        ("grpc", "INVALID_ARGUMENT", "invalid"): 1,
        ("kserve-grpc", "UNAUTHENTICATED", "unauthenticated"): 1,
    }


def test_a_full_queue_is_counted(served, steps):
    long = inference_pb2.GenerateRequest(text="a", stopping={"max_tokens": 100, "ignore_eos": True})
    metadata = [("authorization", f"Bearer {TOKEN}")]
    with grpc.insecure_channel(served.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        running = stub.Generate(long, metadata=metadata)
        next(running)
        waiting = stub.Generate(long, metadata=metadata)
        waiting.initial_metadata()
        assert call(served, "a") == "RESOURCE_EXHAUSTED"
        assert ask(served, "/v1/completions", {"model": "counting", "prompt": "a"}) == 429
        running.cancel(), waiting.cancel()
    assert refusals(served) == {("http", "429", "queue_full"): 1, ("grpc", "RESOURCE_EXHAUSTED", "queue_full"): 1}


def test_every_error_of_requests_has_a_reason():
    """Every exception type has a reason.

    A new exception must be given one; without it a dashboard says `other`.
    """
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SharpError)]
    statuses = [kind for kind, *_ in (*STATUSES, *CODES)]
    for kind in {*kinds, *statuses} - {SharpError}:
        assert any(issubclass(kind, of) for of, _ in REASONS), kind
    assert OTHER not in {reason for _, reason in REASONS}
