"""The checkpoint's sampling applies in every protocol, wherever a request does not set its own."""

import json
import pickle
import shutil
import urllib.request
from dataclasses import replace

import grpc
import openai
import pytest

from sharp import LLM, SamplingParams
from sharp.core.manifest import SamplingDefaults, read_manifest
from sharp.kserve import grpc_service_pb2, grpc_service_pb2_grpc
from sharp.serving.client import Client
from sharp.v1 import control_pb2, inference_pb2
from tests.serving.conftest import SETTINGS

# Without these settings tokens are sampled, and the counting model gives every wrong token one chance in 311.
GREEDY = SamplingDefaults(top_k=1, repetition_penalty=1.25)
SAMPLED = {"top_k": 0, "seed": 1}


@pytest.fixture(scope="module")
def folder(counting, tmp_path_factory):
    copy = tmp_path_factory.mktemp("copies") / "greedy"
    copy.mkdir()
    for name in ("model.onnx", "tokenizer.json"):
        (copy / name).write_bytes((counting / name).read_bytes())
    read_manifest(counting).model_copy(update={"sampling": GREEDY, "name": "greedy"}).write(copy)
    return copy


@pytest.fixture(scope="module")
def server(start_server, folder):
    return start_server(folder)


def http(server, **fields):
    client = openai.OpenAI(base_url=f"http://{server.http_address}/v1", api_key="none")
    return client.completions.create(model="greedy", prompt="a", max_tokens=8, extra_body=fields).choices[0].text


def kserve(server, **fields):
    parameters = json.dumps({"max_tokens": 8, **fields}).encode()
    texts = {"text_input": b"a", "sampling_parameters": parameters}
    inputs = [
        {"name": name, "datatype": "BYTES", "shape": [1], "contents": {"bytes_contents": [text]}}
        for name, text in texts.items()
    ]
    request = grpc_service_pb2.ModelInferRequest(model_name="greedy", inputs=inputs)
    with grpc.insecure_channel(server.grpc_address) as channel:
        response = grpc_service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)
    return response.raw_output_contents[0][4:].decode().removeprefix("a")  # after the text's length and the prompt


def python_client(server, **fields):
    with Client(server.grpc_address) as client:
        return client.generate("a", SamplingParams(max_tokens=8, **fields)).text


@pytest.mark.parametrize("ask", [http, kserve, python_client])
def test_what_is_not_said_is_the_models(server, ask):
    assert ask(server) == "bcdefghi"
    assert ask(server, **SAMPLED) != "bcdefghi"


def test_grpc(server, connect, folder):
    client = connect(folder)
    assert client.generate(sampling=inference_pb2.Sampling(seed=1))[0] == "bcdefghi"
    assert client.generate(sampling=inference_pb2.Sampling(**SAMPLED))[0] != "bcdefghi"
    assert client.control.GetModelInfo(control_pb2.GetModelInfoRequest()).sampling == inference_pb2.Sampling(
        top_k=1, repetition_penalty=1.25
    )


def test_a_server_may_ignore_it(start_server, folder):
    server = start_server(folder, server=replace(SETTINGS.server, model_sampling=False))
    assert http(server, seed=1) != "bcdefghi"


def test_without_a_server(folder):
    llm = LLM(folder)
    assert [completion.text for completion in llm.generate(["a"] * 3, SamplingParams(max_tokens=8))] == ["bcdefghi"] * 3
    assert llm.generate("a", SamplingParams(max_tokens=8, **SAMPLED))[0].text != "bcdefghi"


def test_what_counts_as_given():
    """A parameter counts as given even with its usual value, and a copy with another seed gives no parameter more."""
    defaults = {"temperature": 0.5, "top_k": 3, "repetition_penalty": 1.25}
    params = pickle.loads(pickle.dumps(replace(SamplingParams(top_k=-1, repetition_penalty=None), seed=1)))
    found = params.with_defaults(defaults)
    assert (found.temperature, found.top_k, found.repetition_penalty, found.seed) == (0.5, 0, 1.25, 1)
    assert replace(params, temperature=1).with_defaults(defaults).temperature == 1
    assert found.with_defaults({"temperature": 2.0}) is found


def test_the_page_shows_the_numbers_in_force(start_server, folder, server, server_settings):
    manifest = read_manifest(folder)
    copied = folder.with_name("told")
    shutil.copytree(folder, copied)
    told = SamplingDefaults(temperature=0.2, top_k=1)
    manifest.model_copy(update={"sampling": told, "sampling_source": "--sampling"}).write(copied)
    off = replace(server_settings.server, model_sampling=False)

    def shown(started):
        with urllib.request.urlopen(f"http://{started.http_address}/live", timeout=10) as response:
            model = json.load(response)["model"]
        return model["sampling"], model["sampling_source"]

    assert shown(start_server(copied)) == ({"temperature": 0.2, "top_p": 1.0, "top_k": 1}, "--sampling")
    assert shown(start_server(copied, server=off)) == ({"temperature": 1.0, "top_p": 1.0}, None)
    assert shown(server) == ({"temperature": 1.0, "top_p": 1.0, "top_k": 1, "repetition_penalty": 1.25}, None)
