"""Models of sets and of numbers are served by their own tensors, over gRPC and over HTTP."""

import json
import threading
from dataclasses import replace

import grpc
import numpy as np
import pytest
import requests
import torch
from click.testing import CliRunner

from sharp.core.errors import InputError
from sharp.core.manifest import read_manifest
from sharp.exporter.evaluate import main as evaluate
from sharp.exporter.forms.uncached.remote_model import RemoteModel
from sharp.kserve import grpc_service_pb2 as messages
from sharp.kserve import grpc_service_pb2_grpc
from sharp.models.evaluation import measure
from sharp.models.tasks.registry import get_task
from sharp.serving.api_config import ApiConfig
from sharp.serving.config import EngineConfig
from sharp.serving.tensors.engine import TensorEngine
from tests.serving.conftest import wait_for
from tests.tensor_models import export_tensor_model, numbers_model, set_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return the model folder and the model of each kind."""
    models = {"set": (set_model("asentmax"), "max-retrieval"), "numbers": (numbers_model(), None)}
    return {
        kind: (export_tensor_model(tmp_path_factory.mktemp(kind), model, task=task), model)
        for kind, (model, task) in models.items()
    }


@pytest.fixture(scope="module")
def servers(folders, start_server):
    return {kind: start_server(folder) for kind, (folder, _) in folders.items()}


@pytest.fixture(scope="module")
def stubs(servers):
    channels = {kind: grpc.insecure_channel(server.grpc_address) for kind, server in servers.items()}
    yield {kind: grpc_service_pb2_grpc.GRPCInferenceServiceStub(channel) for kind, channel in channels.items()}
    for channel in channels.values():
        channel.close()


@pytest.fixture
def url(servers):
    return f"http://{servers['set'].http_address}/v2/models/model"


def inputs_of(kind, rows, tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if kind == "numbers":
        return {"numbers": torch.randn(rows, tokens, generator=generator)}
    items, query = get_task("max-retrieval").sampler.sample(rows, tokens, generator).inputs
    return {"items": items, "query": query}


def message(inputs, *, raw=True, **fields):
    request = messages.ModelInferRequest(model_name="model", id="7", **fields)
    for name, tensor in inputs.items():
        added = request.inputs.add(name=name, datatype="FP32", shape=tensor.shape)
        if raw:
            request.raw_input_contents.append(tensor.numpy().tobytes())
        else:
            added.contents.fp32_contents.extend(tensor.flatten().tolist())
    return request


def body(inputs, **fields):
    tensors = [
        {"name": name, "datatype": "FP32", "shape": list(tensor.shape), "data": tensor.tolist()}
        for name, tensor in inputs.items()
    ]
    return {"inputs": tensors, **fields}


def values(response):
    (output,) = response.outputs
    return np.frombuffer(response.raw_output_contents[0], "<f4").reshape(output.shape)


@torch.no_grad()
def expected(model, inputs):
    return model(*inputs.values()).numpy()


@pytest.mark.parametrize("kind", ["set", "numbers"])
@pytest.mark.parametrize("raw", [True, False])
def test_outputs_are_those_of_pytorch(stubs, folders, kind, raw):
    inputs = inputs_of(kind, 3, 19)
    response = stubs[kind].ModelInfer(message(inputs, raw=raw), timeout=20)
    assert (response.id, response.model_name, response.model_version) == ("7", "model", "1")
    assert response.outputs[0].name == {"set": "logits", "numbers": "predictions"}[kind]
    np.testing.assert_allclose(values(response), expected(folders[kind][1], inputs), atol=1e-4)


def test_the_table_of_the_paper_goes_through_a_server(servers, folders):
    folder, model = folders["set"]
    served = RemoteModel(f"http://{servers['set'].http_address}", read_manifest(folder))
    task = get_task("max-retrieval")

    def table(scored):
        return measure(scored, task, task.sampler, (16, 1024, 16_384), None, samples=20, seed=1)

    assert [row.score for row in table(served)] == [row.score for row in table(model)]


def test_the_command_compares_a_server_with_the_kernels(servers, folders, tmp_path):
    url, output = f"http://{servers['set'].http_address}", tmp_path / "rows.json"
    arguments = ["--runtime", "kernels", "--server", url, "--lengths", "16,64", "--samples", "30", "--output", output]
    result = CliRunner().invoke(evaluate, [str(word) for word in (folders["set"][0], *arguments)])
    assert result.exit_code == 0, result.output
    rows = json.loads(output.read_text())
    assert [row["runtime"] for row in rows] == ["kernels", "kernels", "server", "server"]
    assert rows[0]["score"] == rows[2]["score"]


def test_a_model_of_numbers_is_evaluated_on_a_server(servers, folders):
    folder, model = folders["numbers"]
    served = RemoteModel(f"http://{servers['numbers'].http_address}", read_manifest(folder))
    task = get_task("every")

    def table(scored):
        return measure(scored, task, task.sampler, (10, 100), None, samples=20, seed=1)

    assert [row.score for row in table(served)] == [row.score for row in table(model)]


def test_the_metadata_has_the_tensors_of_the_model(stubs, url):
    metadata = stubs["set"].ModelMetadata(messages.ModelMetadataRequest(name="model"), timeout=10)
    described = [(tensor.name, tensor.datatype, list(tensor.shape)) for tensor in (*metadata.inputs, *metadata.outputs)]
    assert described == [
        ("items", "FP32", [-1, -1, 11]),
        ("query", "FP32", [-1, 1]),
        ("logits", "FP32", [-1, 10]),
    ]
    assert requests.get(url, timeout=10).json()["inputs"][0] == {
        "name": "items",
        "datatype": "FP32",
        "shape": [-1, -1, 11],
    }
    config = requests.get(f"{url}/config", timeout=10).json()
    assert (config["input"][0]["dims"], config["model_transaction_policy"]) == ([-1, -1, 11], {"decoupled": False})
    assert stubs["set"].ModelReady(messages.ModelReadyRequest(name="model"), timeout=10).ready
    (index,) = stubs["set"].RepositoryIndex(messages.RepositoryIndexRequest(), timeout=10).models
    assert (index.name, index.state) == ("model", "READY")


def test_json_and_binary_tensors_give_the_same(url, servers, folders):
    folder, model = folders["set"]
    inputs = inputs_of("set", 2, 5)
    response = requests.post(f"{url}/infer", json=body(inputs, outputs=[{"name": "logits"}]), timeout=20).json()
    (output,) = response["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("logits", "FP32", [2, 10])
    np.testing.assert_allclose(np.reshape(output["data"], (2, 10)), expected(model, inputs), atol=1e-4)
    served = RemoteModel(f"http://{servers['set'].http_address}", read_manifest(folder))
    assert served(*inputs.values()).flatten().tolist() == output["data"]


@pytest.mark.parametrize("kind", ["set", "numbers"])
def test_a_stream_has_one_response_for_each_request(stubs, folders, kind):
    inputs = [inputs_of(kind, 1, tokens) for tokens in (2, 3)]
    responses = {
        tuple(response.infer_response.outputs[0].shape): response.infer_response
        for response in stubs[kind].ModelStreamInfer(iter([message(given) for given in inputs]), timeout=20)
    }
    assert all(response.parameters["triton_final_response"].bool_param for response in responses.values())
    if kind == "numbers":
        for given in inputs:
            found = values(responses[1, given["numbers"].shape[1], 2])
            np.testing.assert_allclose(found, expected(folders[kind][1], given), atol=1e-4)


WRONG = {
    "unknown": (lambda given: {"text_input": given["items"]}, "input 'text_input' is not known; the inputs are items"),
    "missing": (lambda given: {"items": given["items"]}, "input 'query' is missing; the inputs are items, query"),
    "features": (
        lambda given: {**given, "items": given["items"][..., :9]},
        r"input 'items' has shape \[3, 5, 9\]; it must be \[batch, items, 11\]",
    ),
    "rank": (lambda given: {**given, "items": given["items"][0]}, r"input 'items' has shape \[5, 11\]; it must be"),
    "no items": (lambda given: {**given, "items": given["items"][:, :0]}, r"has shape \[3, 0, 11\]; it must be"),
    "another batch": (
        lambda given: {**given, "query": given["query"][:2]},
        "input 'query' has 2 as its batch, and input 'items' has 3; they must be the same",
    ),
    "not finite": (lambda given: {**given, "items": given["items"] / 0}, "input 'items' has numbers that are not fin"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_tensors_get_a_sentence(stubs, url, name):
    change, sentence = WRONG[name]
    inputs = change(inputs_of("set", 3, 5))
    with pytest.raises(grpc.RpcError, match=sentence) as error:
        stubs["set"].ModelInfer(message(inputs), timeout=10)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    refused = requests.post(f"{url}/infer", data=json.dumps(body(inputs)), timeout=10)
    assert (refused.status_code, sentence.replace("\\", "")[:40] in refused.json()["error"]) == (400, True)


def test_a_tensor_that_is_not_what_it_says_gets_a_sentence(stubs):
    inputs = inputs_of("set", 2, 5)

    def refused(change):
        request = message(inputs)
        change(request)
        with pytest.raises(grpc.RpcError) as error:
            stubs["set"].ModelInfer(request, timeout=10)
        return error.value.details()

    def integers(request):
        request.inputs[0].datatype = "INT64"

    def shape(*sizes):
        return lambda request: request.inputs[0].ClearField("shape") or request.inputs[0].shape.extend(sizes)

    assert refused(integers) == "input 'items' has datatype 'INT64'; it must be FP32"
    assert "has 440 bytes, and its shape is [2, 6, 11] of FP32" in refused(shape(2, 6, 11))
    assert "and its shape is [-2, -5, 11] of FP32" in refused(shape(-2, -5, 11))
    assert "and its shape is [] of FP32" in refused(shape())
    assert "input 'items' has a shape that no tensor has" in refused(
        lambda request: (shape(*[1] * 100)(request), request.raw_input_contents.__setitem__(0, bytes(4)))
    )
    assert "input 'items' has" in refused(
        lambda request: (shape(0, 2**62, 2**62)(request), request.raw_input_contents.__setitem__(0, b""))
    )
    assert "has 439 bytes" in refused(lambda request: request.raw_input_contents.__setitem__(0, bytes(439)))
    assert "raw_input_contents has 1 of 2 inputs" in refused(lambda request: request.raw_input_contents.pop())
    assert "input 'items' is there twice" in refused(lambda request: setattr(request.inputs[1], "name", "items"))
    assert "output 'stats' is not known; the output is logits" in refused(lambda one: one.outputs.add(name="stats"))
    assert refused(lambda request: setattr(request.parameters["Timeout"], "int64_param", 5)) == (
        "parameter 'Timeout' is not known here; did you mean timeout?"
    )


def test_other_parameters_are_left_out_or_refused_as_the_server_is_told(folders, start_server, url, caplog):
    asked = body(inputs_of("set", 1, 3), parameters={"priority": 1})
    assert requests.post(f"{url}/infer", json=asked, timeout=10).status_code == 200
    said = "the field 'priority' of a request is not known here and is left out"
    # the sentence ends with the number of fields that were left out before
    assert any(message.startswith(said) for message in caplog.messages)
    strict = start_server(folders["set"][0], api=ApiConfig(unknown_fields="error")).http_address
    refused = requests.post(f"http://{strict}/v2/models/model/infer", json=asked, timeout=10)
    assert (refused.status_code, refused.json()) == (
        400,
        {"error": "parameter 'priority' is not known here; known are timeout"},
    )


def test_sizes_are_limited(folders, start_server, stubs):
    with pytest.raises(grpc.RpcError, match="input 'numbers' has 201 as its length; the limit is 200"):
        stubs["numbers"].ModelInfer(message(inputs_of("numbers", 1, 201)), timeout=10)
    with pytest.raises(grpc.RpcError, match="has 1311 rows with 100 as their length; the limit is 131072 in all"):
        stubs["numbers"].ModelInfer(message(inputs_of("numbers", 1311, 100)), timeout=10)
    small = start_server(folders["set"][0], engine=EngineConfig(max_context=7))
    response = requests.post(
        f"http://{small.http_address}/v2/models/model/infer", json=body(inputs_of("set", 1, 8)), timeout=10
    )
    assert (response.status_code, "the limit is 7" in response.json()["error"]) == (400, True)


@pytest.fixture
def slow(monkeypatch):
    """Return an event; the engine's steps wait until it is set."""
    go, step = threading.Event(), TensorEngine.step

    def waiting(engine):
        assert go.wait(20)
        return step(engine)

    monkeypatch.setattr(TensorEngine, "step", waiting)
    yield go
    go.set()


def load_of(server):
    return requests.get(f"http://{server.http_address}/load", timeout=10).json()["server_load"]


def test_a_request_that_takes_too_long_or_is_given_up_ends(stubs, servers, url, slow):
    request = message(inputs_of("set", 1, 3))
    request.parameters["timeout"].int64_param = 50_000
    with pytest.raises(grpc.RpcError, match="took longer than its timeout") as error:
        stubs["set"].ModelInfer(request, timeout=10)
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    late = requests.post(f"{url}/infer", json=body(inputs_of("set", 1, 3), parameters={"timeout": 50_000}), timeout=10)
    assert (late.status_code, "took longer" in late.json()["error"]) == (504, True)
    call = stubs["set"].ModelInfer.future(message(inputs_of("set", 1, 3)))
    wait_for(lambda: load_of(servers["set"]) == 1)
    call.cancel()
    wait_for(lambda: load_of(servers["set"]) == 0)
    slow.set()
    assert stubs["set"].ModelInfer(message(inputs_of("set", 1, 3)), timeout=10).outputs


def test_metrics_and_statistics_count_requests_and_attention(stubs, servers):
    stubs["set"].ModelInfer(message(inputs_of("set", 4, 6)), timeout=10)
    text = requests.get(f"http://{servers['set'].http_address}/metrics?attention=head", timeout=10).text
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(lines['sharp_requests_total{finish_reason="stop",model="model"}']) >= 1
    assert float(lines['sharp_prompt_tokens_total{model="model"}']) >= 24
    assert 'sharp_attention_normalized_entropy{model="model",layer="0",head="0"}' in lines
    counted = stubs["set"].ModelStatistics(messages.ModelStatisticsRequest(name="model"), timeout=10).model_stats[0]
    assert counted.inference_stats.success.count >= 1
    assert counted.inference_stats.compute_infer.count >= 1


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/score", "/v2/models/model/generate"]
)
def test_routes_of_other_models_say_what_this_one_is(servers, path):
    given = {"prompt": "a", "text_input": "a"}
    refused = requests.post(f"http://{servers['set'].http_address}{path}", json=given, timeout=10)
    error = refused.json()["error"]
    said = error if isinstance(error, str) else error["message"]
    known = "input 'text_input' is not known" if path.endswith("generate") else "is a model of sets: send its tensors"
    assert (refused.status_code, known in said) == (400, True), said


def test_it_is_ready_and_has_a_page(servers):
    base = f"http://{servers['numbers'].http_address}"
    for path in ("/health/ready", "/health/live", "/v1/models", "/live", "/openapi.json"):
        assert requests.get(base + path, timeout=10).status_code == 200, path


def test_a_server_that_does_not_respond_is_said(folders, servers):
    manifest = read_manifest(folders["set"][0])
    with pytest.raises(InputError, match="does not respond"):
        RemoteModel("http://127.0.0.1:1", manifest)
    with pytest.raises(InputError, match="has inputs numbers; serve model there"):
        RemoteModel(f"http://{servers['numbers'].http_address}", manifest)
    with pytest.raises(InputError, match="is no model of a KServe server"):
        RemoteModel(f"http://{servers['numbers'].http_address}/live?", manifest)
    with pytest.raises(InputError, match="must be an address such as"):
        RemoteModel("127.0.0.1:1", manifest)
    with pytest.raises(InputError, match="is not served here"):
        RemoteModel(f"http://{servers['set'].http_address}", manifest.model_copy(update={"name": "other"}))


def test_tokens_hold_here_too(folders, start_server, server_settings, tmp_path):
    (tmp_path / "tokens").write_text("secret\n")
    server = start_server(folders["set"][0], server=replace(server_settings.server, token_file=tmp_path / "tokens"))
    url = f"http://{server.http_address}/v2/models/model/infer"
    assert requests.post(url, json=body(inputs_of("set", 1, 3)), timeout=10).status_code == 401
