"""KServe's protocol and Triton's extensions over HTTP.

`tritonclient.http` itself is tested in tests/full/clients.
"""

import json
import logging
import struct
from dataclasses import replace

import pytest
import requests

from sharp.serving.api_config import ApiConfig

BINARY = "inference-header-content-length"


@pytest.fixture(scope="module")
def address(start_server, counting):
    return f"http://{start_server(counting).http_address}/v2"


def tensors(text="a", **sampling):
    sampling = json.dumps({"temperature": 0, "max_tokens": 3, **sampling})
    return [
        {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [text]},
        {"name": "sampling_parameters", "datatype": "BYTES", "shape": [1], "data": [sampling]},
        {"name": "exclude_input_in_output", "datatype": "BOOL", "shape": [1], "data": [[True]]},
        {"name": "return_num_output_tokens", "datatype": "BOOL", "shape": [1], "data": [True]},
    ]


def infer(address, body, model="counting", headers=None, **fields):
    data = body if isinstance(body, bytes) else json.dumps({"inputs": body, **fields}).encode()
    return requests.post(f"{address}/models/{model}/infer", data=data, headers=headers, timeout=20)


def test_what_a_client_asks_first(address):
    def get(path):
        return requests.get(address + path, timeout=10)

    assert get("").json()["name"] == "sharp"
    for path in ("/health/live", "/health/ready", "/models/counting/ready", "/models/counting/versions/1/ready"):
        assert get(path).status_code == 200
    # kserve's own client reads these bodies; Triton's goes by the status.
    assert (get("/health/live").json(), get("/health/ready").json()) == ({"live": True}, {"ready": True})
    assert get("/models/counting/ready").json() == {"name": "counting", "ready": True}
    metadata = get("/models/counting").json()
    assert (metadata["versions"], metadata["inputs"][0]) == (
        ["1"],
        {"name": "text_input", "datatype": "BYTES", "shape": [1]},
    )
    assert get("/models/counting/config").json()["model_transaction_policy"] == {"decoupled": True}
    index = requests.post(f"{address}/repository/index", timeout=10).json()
    assert [(model["name"], model["version"], model["state"]) for model in index] == [("counting", "1", "READY")]


@pytest.mark.parametrize("slash", ["/", "%2F"])
def test_a_name_with_a_slash_has_its_routes(start_server, counting, slash):
    api = ApiConfig(served_model_name="meta-llama/Llama-3.1-8B")
    address = f"http://{start_server(counting, api=api).http_address}/v2/models/meta-llama{slash}Llama-3.1-8B"
    for path in ("", "/ready", "/versions/1", "/versions/1/ready"):
        assert requests.get(address + path, timeout=10).json()["name"] == "meta-llama/Llama-3.1-8B"
    for path in ("/infer", "/versions/1/infer"):
        response = requests.post(address + path, json={"inputs": tensors()}, timeout=20)
        assert response.json()["model_name"] == "meta-llama/Llama-3.1-8B"
    assert requests.get(f"{address}/other", timeout=10).status_code == 404


@pytest.mark.parametrize("path", ["/models/counting/infer", "/models/counting/versions/1/infer"])
def test_inference_with_json(address, path):
    response = requests.post(address + path, json={"id": "7", "inputs": tensors()}, timeout=20).json()
    assert (response["id"], response["model_name"], response["parameters"]) == (
        "7",
        "counting",
        {"finish_reason": "length"},
    )
    outputs = {output["name"]: output["data"] for output in response["outputs"]}
    assert outputs == {"text_output": ["bcd"], "num_output_tokens": [3]}
    counted = requests.get(f"{address}/models/counting/stats", timeout=10).json()["model_stats"][0]
    assert counted["inference_count"] == counted["inference_stats"]["success"]["count"] > 0


def test_inference_with_binary_tensors(address):
    inputs = tensors()
    parts = []
    for tensor in inputs:
        value = tensor.pop("data")[0]
        text = value.encode() if isinstance(value, str) else None
        parts.append(struct.pack("<I", len(text)) + text if text else b"\1")
        tensor["parameters"] = {"binary_data_size": len(parts[-1])}
    outputs = [{"name": "text_output", "parameters": {"binary_data": True}}, {"name": "num_output_tokens"}]
    for fields in ({"outputs": outputs}, {"parameters": {"binary_data_output": True}}):
        header = json.dumps({"inputs": inputs, **fields}).encode()
        response = infer(address, b"".join((header, *parts)), headers={BINARY: str(len(header))})
        length = int(response.headers[BINARY])
        described = json.loads(response.content[:length])
        text = next(output for output in described["outputs"] if output["name"] == "text_output")
        assert text["parameters"] == {"binary_data_size": 7}
        assert response.content[length : length + 7] == b"\3\0\0\0bcd"


def test_generate(address):
    body = {"text_input": "a", "max_tokens": 3, "parameters": {"temperature": 0}}
    whole = requests.post(f"{address}/models/counting/generate", json=body, timeout=20).json()
    assert (whole["text_output"], whole["finish_reason"]) == (
        "abcd",
        "length",
    )  # Triton's vLLM backend begins with the prompt
    documented = {"stream": False, "temperature": 0, "max_tokens": 3, "exclude_input_in_output": True}
    for more in ({"parameters": documented}, documented, {**documented, "sampling_parameters": '{"max_tokens": 2}'}):
        own = requests.post(f"{address}/models/counting/generate", json={"text_input": "a", **more}, timeout=20).json()
        assert own["text_output"] == ("bc" if "sampling_parameters" in more else "bcd")
    for wrong, message in (({"stream": True}, "generate_stream"), ({"exclude_input_in_output": "no"}, "true or false")):
        refused = requests.post(f"{address}/models/counting/generate", json={**body, **wrong}, timeout=20)
        assert (refused.status_code, message in refused.json()["error"]) == (400, True), refused.text


def counts(address: str) -> tuple[int, int]:
    """Return how many requests succeeded, and how many failed."""
    (stats,) = requests.get(f"{address}/models/counting/stats", timeout=20).json()["model_stats"]
    return stats["inference_stats"]["success"]["count"], stats["inference_stats"]["fail"]["count"]


def test_generate_stream(address):
    body = {"text_input": "a", "max_tokens": 3, "parameters": {"temperature": 0}}
    before = counts(address)
    stream = requests.post(f"{address}/models/counting/generate_stream", json=body, timeout=20)
    events = [json.loads(line.removeprefix("data: ")) for line in stream.text.split("\n\n") if line]
    assert "".join(event["text_output"] for event in events) == "bcd"
    assert events[-1]["triton_final_response"] is True
    refused = requests.post(f"{address}/models/counting/generate_stream", json={**body, "top_p": 2}, timeout=20)
    assert (refused.status_code, refused.json()["error"][:10]) == (400, "top_p is 2")
    assert counts(address) == (before[0] + 1, before[1] + 1)


OF_VLLM = {
    "best_of": 1,
    "use_beam_search": "false",
    "length_penalty": 1.0,
    "early_stopping": False,
    "spaces_between_special_tokens": True,
    "detokenize": True,
    "logprobs": "1",
    "prompt_logprobs": None,
    "output_kind": 2,
    "return_logprobs": False,
}


def generate(address, **sampling):
    """Return the completion of a text, or the status and the error."""
    body = {"text_input": "abc", "exclude_input_in_output": True, "temperature": 0, "max_tokens": 3, **sampling}
    response = requests.post(f"{address}/models/counting/generate", json=body, timeout=20)
    return response.json()["text_output"] if response.ok else (response.status_code, response.json()["error"])


@pytest.fixture(scope="module")
def strict(start_server, counting):
    return f"http://{start_server(counting, api=ApiConfig(unknown_fields='error')).http_address}/v2"


def test_vllms_sampling_parameters_are_known(strict):
    assert generate(strict, **OF_VLLM) == "def"
    response = infer(strict, tensors("abc", **OF_VLLM)).json()
    assert response["outputs"][0]["data"] == ["def"]
    assert generate(strict, truncate_prompt_tokens="2", truncation_side="right") == "cde"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"guided_json": {"const": 7}}, "7"),
        ({"guided_regex": "[xy]{2}z"}, "xxz"),
        ({"guided_choice": ["yes"]}, "yes"),
        ({"guided_grammar": 'start: "no"'}, "no"),
        ({"structured_outputs": {"choice": ["yes"]}}, "yes"),
        ({"structured_outputs": '{"regex": "no"}'}, "no"),
        ({"guided_decoding": '{"choice": ["yes"]}'}, "yes"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": 7}}}}, "7"),
    ],
)
def test_structured_outputs_as_in_vllm(strict, fields, text):
    found = generate(strict, **fields)
    assert found == text if "regex" not in "".join(fields) else (len(found), found[-1]) == (3, "z")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_beam_search": True}, "use_beam_search is true; beam search is not supported here"),
        ({"detokenize": False}, "detokenize is false; text_output is a text"),
        ({"return_logprobs": True}, "return_logprobs is true; there is return_cumulative_logprob only"),
        ({"lora_name": "mine"}, "lora_name is 'mine'; this server has no adapters"),
        ({"n": 2}, "n is 2; text_output holds one completion"),
        ({"guided_decoding": "x"}, "guided_decoding must be a JSON object"),
        ({"guided_decoding": {"regex": "("}}, "guided_decoding.regex cannot be used"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex and guided_choice are both set"),
        ({"temprature": 1}, "temprature is not known here; did you mean temperature?"),
    ],
)
def test_what_would_change_the_completion_is_refused_by_name(address, fields, message):
    code, error = generate(address, **fields)
    assert (code, message in error) == (400, True), error


def test_what_a_newer_client_of_triton_sends_is_left_out_and_named_once(start_server, counting, strict, caplog):
    caplog.set_level(logging.WARNING, "sharp.serving.frontends.unknown_fields")
    address = f"http://{start_server(counting).http_address}/v2"
    for _ in range(2):
        assert generate(address, newest={"a": 1}, best_of=1) == "def"
        assert infer(address, tensors(newest=1)).status_code == 200
    assert [record.args[0] for record in caplog.records] == ["newest", "best_of"]
    assert generate(strict, newest=1) == (400, "newest is not known here")
    ignoring = start_server(counting, api=ApiConfig(unknown_fields="ignore")).http_address
    assert generate(f"http://{ignoring}/v2", temprature=9) == "def"


@pytest.mark.parametrize(
    ("body", "model", "status", "message"),
    [
        (tensors(), "other", 404, "model 'other' is not served here"),
        (tensors(top_p=2), "counting", 400, "top_p is 2"),
        (b"[", "counting", 400, "cannot be read as KServe's JSON"),
        (b"[]", "counting", 400, "cannot be read as KServe's JSON"),
        ([{"name": "text_input"}], "counting", 400, "'datatype'"),
        ([{"name": "text_input", "datatype": "X"}], "counting", 400, "has datatype 'X', which is not read here"),
        ([{"name": "x", "datatype": "FP32", "shape": [1], "data": ["a"]}], "counting", 400, "cannot be read"),
        ([{"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}], "counting", 400, "input 'x' is not known"),
        ([{"name": "x", "datatype": "FP32", "data": []}] * 65, "counting", 400, "has 65 inputs; the limit is 64"),
        (
            [{"name": "text_input", "datatype": "BYTES", "parameters": {"binary_data_size": 9}}],
            "counting",
            400,
            "binary_data_size is 9; 0 bytes are left of the body",
        ),
    ],
)
def test_errors_are_texts_as_in_triton(address, body, model, status, message):
    response = infer(address, body, model)
    assert (response.status_code, message in response.json()["error"]) == (status, True), response.text


def test_other_errors(address):
    bad = infer(address, b"{}", headers={BINARY: "99"})
    assert bad.json() == {"error": "inference-header-content-length is '99'; the body has 2 bytes"}
    for digit in "09":
        endless = infer(address, b"{}", headers={BINARY: digit * 5000})
        assert (endless.status_code, "the body has 2 bytes" in endless.json()["error"]) == (400, True)
    missing = requests.get(f"{address}/models/counting/versions/2", timeout=10)
    assert (missing.status_code, "has no version '2'" in missing.json()["error"]) == (404, True)
    streamed = [*tensors(), {"name": "stream", "datatype": "BOOL", "shape": [1], "data": [True]}]
    assert "only ModelStreamInfer can stream" in infer(address, streamed).json()["error"]
    nested = b'{"inputs": [{"name": "x", "datatype": "FP32", "data": ' + b"[" * 5000 + b"]" * 5000 + b"}]}"
    assert infer(address, nested).status_code == 400


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/repository/models/counting/load", 404),
        ("GET", "/systemsharedmemory/status", 404),
        ("POST", "/models/counting/ready", 405),
        ("POST", "/rerank", 400),  # a path of Cohere's API, with errors like OpenAI's
    ],
)
def test_errors_of_other_paths_are_texts_too(address, method, path, status):
    response = requests.request(method, address + path, json={}, timeout=10)
    error = response.json()["error"]
    assert response.status_code == status
    if path == "/rerank":
        assert "serve an encoder" in error["message"]
    else:
        assert error == f"there is no {method} /v2{path} here"


def test_tokens_and_limits_hold_here_too(start_server, counting, server_settings, tmp_path):
    (tmp_path / "tokens").write_text("secret\n")
    server = replace(server_settings.server, token_file=tmp_path / "tokens", max_message_bytes=1000)
    address = f"http://{start_server(counting, server=server).http_address}/v2"
    refused = infer(address, tensors())
    assert (refused.status_code, "token" in refused.json()["error"]) == (401, True)
    assert requests.get(f"{address}/health/ready", timeout=10).status_code == 200
    assert requests.post(f"{address}/repository/index", timeout=10).status_code == 401
    allowed = {"authorization": "Bearer secret"}
    assert infer(address, tensors(), headers=allowed).status_code == 200
    assert infer(address, tensors("x" * 1000), headers=allowed).status_code == 413
