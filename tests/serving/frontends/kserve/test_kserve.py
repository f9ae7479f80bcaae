"""`tritonclient`, unchanged, against the server."""

import json
import math
import struct
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest

from sharp.kserve import grpc_service_pb2 as messages
from sharp.kserve import grpc_service_pb2_grpc
from sharp.serving.text.tokenizer import Tokenizer
from tests.serving.conftest import idle, wait_for
from tests.serving.grpc_client import status


@pytest.fixture(scope="module")
def got(start_server, counting):
    """Run `triton_client.py` against a server, and return the JSON that it printed."""
    program = Path(__file__).with_name("triton_client.py")
    command = [sys.executable, str(program), start_server(counting).grpc_address]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def stub(start_server, counting):
    with grpc.insecure_channel(start_server(counting).grpc_address) as channel:
        yield grpc_service_pb2_grpc.GRPCInferenceServiceStub(channel)


def test_live_ready_and_metadata(got):
    assert got["ready"] == [True, True, True]
    assert got["server"] == "sharp"
    assert got["metadata"]["inputs"][0] == {"name": "text_input", "datatype": "BYTES", "shape": ["1"]}
    assert got["metadata"]["outputs"][0] == {"name": "text_output", "datatype": "BYTES", "shape": ["1"]}


def test_every_number_is_that_of_triton(got):
    file = messages.DESCRIPTOR
    for name, message in file.message_types_by_name.items():
        assert {field.name: field.number for field in message.fields}.items() <= got["numbers"][name].items(), name
    for name, enum in file.enum_types_by_name.items():
        assert {value.name: value.number for value in enum.values}.items() <= got["numbers"][name].items(), name


def test_the_index_has_the_model(stub):
    (model,) = stub.RepositoryIndex(messages.RepositoryIndexRequest(), timeout=10).models
    assert (model.name, model.version, model.state) == ("counting", "1", "READY")


def test_the_configuration(got):
    config = got["config"]
    assert (config["name"], config["backend"], config.get("max_batch_size", 0)) == ("counting", "sharp", 0)
    assert config["model_transaction_policy"] == {"decoupled": True}
    tensors = {
        tensor["name"]: (tensor["data_type"], tensor["dims"], tensor.get("optional", False))
        for tensor in config["input"]
    }
    assert tensors["text_input"] == ("TYPE_STRING", ["1"], False)
    assert tensors["stream"] == tensors["return_finish_reason"] == ("TYPE_BOOL", ["1"], True)
    assert {tensor["name"]: tensor["data_type"] for tensor in config["output"]} == {
        "text_output": "TYPE_STRING",
        "finish_reason": "TYPE_STRING",
        "cumulative_logprob": "TYPE_FP32",
        "num_input_tokens": "TYPE_UINT32",
        "num_output_tokens": "TYPE_UINT32",
    }


def test_statistics(got):
    ((before,), (after,)) = got["statistics"]
    assert (before["name"], before["version"], before.get("inference_count", "0")) == ("counting", "1", "0")
    stats = after["inference_stats"]
    assert after["inference_count"] == stats["success"]["count"] == stats["queue"]["count"] == "10"
    assert stats["fail"]["count"] == "9"
    assert int(stats["success"]["ns"]) > int(stats["compute_infer"]["ns"]) > 0
    assert int(after["last_inference"]) == pytest.approx(time.time() * 1000, abs=60_000)


def test_what_a_request_may_want_returned(got):
    whole, first, second, last, listed = got["returned"]
    logprob = math.log(math.exp(4) / (math.exp(4) + 256))  # the logprob of every token of the counting model
    assert (whole["text_output"], whole["finish_reason"]) == ("abcd", "length")
    assert (whole["num_input_tokens"], whole["num_output_tokens"]) == (["uint32", 2], ["uint32", 2])
    assert whole["cumulative_logprob"] == ["float32", pytest.approx(2 * logprob, abs=1e-5)]
    assert [part["text_output"] for part in (first, second, last)] == ["c", "d", ""]
    assert [part["finish_reason"] for part in (first, second, last)] == ["None", "None", "length"]
    assert [part["num_output_tokens"][1] for part in (first, second, last)] == [1, 1, 0]
    logprobs = [part["cumulative_logprob"][1] for part in (first, second, last)]
    assert logprobs == pytest.approx([logprob, 2 * logprob, 2 * logprob], abs=1e-5)
    assert listed == {"num_output_tokens": ["uint32", 2]}


def test_a_whole_response(got):
    assert (got["whole"], got["without_input"], got["parameters"]) == ("abcde", "bcde", "abc")
    assert got["guided"] in ("ayes", "ano")
    # the time limit is a microsecond; without a limit, the completion would have 127 tokens
    assert len(got["timeout"]) < 60


def test_requests_of_a_stream_run_together_and_fail_alone(got):
    assert [entry for entry in got["stream"] if entry[0] == "parts"] == [
        ["parts", text, final, None] for text, final in (("b", False), ("c", False), ("d", False), ("", True))
    ]
    assert [entry for entry in got["stream"] if entry[0] == "whole"] == [["whole", "klmn", True, None]]
    assert [entry[3] for entry in got["stream"] if entry[3]] == ["prompt has 0 tokens; it must have at least 1"]


@pytest.mark.parametrize(
    ("case", "code", "message"),
    [
        ("no_model", "NOT_FOUND", "model 'other' is not served here; the server has 'counting'"),
        ("no_version", "NOT_FOUND", "model 'counting' has no version '7'; it has version '1'"),
        ("bad_value", "INVALID_ARGUMENT", "top_p is 2.0; it must be a number more than 0 and at most 1"),
        ("bad_name", "INVALID_ARGUMENT", "temprature is not known here; did you mean temperature?"),
        ("bad_json", "INVALID_ARGUMENT", "input 'sampling_parameters' must be a JSON object: "),
        ("bad_stream", "INVALID_ARGUMENT", "stream is true; only ModelStreamInfer can stream"),
        ("no_text", "INVALID_ARGUMENT", "input 'text_input' is missing"),
        (
            "not_returned",
            "INVALID_ARGUMENT",
            "output 'finish_reason' is requested; it needs input 'return_finish_reason'",
        ),
        ("no_output", "INVALID_ARGUMENT", "output 'logits' is not known; the outputs are text_output, finish_reason"),
    ],
)
def test_errors(got, case, code, message):
    assert got[case][0] == f"StatusCode.{code}"
    assert got[case][1].startswith(message)


def request(raw=None, **fields):
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1], **fields}
    return messages.ModelInferRequest(
        model_name="counting",
        inputs=[tensor],
        raw_input_contents=[] if raw is None else [raw],
        parameters={"temperature": {"double_param": 0}, "max_tokens": {"int64_param": 120}},
    )


def test_contents_in_the_message_are_as_good_as_raw_ones(stub):
    response = stub.ModelInfer(request(contents={"bytes_contents": [b"a"]}), timeout=20)
    assert response.raw_output_contents[0][4:].startswith(b"abcdefgh")


def test_parameters_of_vllm_and_those_of_a_newer_client_are_no_error(stub):
    one = request(contents={"bytes_contents": [b"a"]})
    one.parameters["beam_width"].int64_param = 2
    one.parameters["best_of"].string_param = "1"
    one.parameters["guided_decoding"].string_param = '{"choice": ["yes"], "backend": "xgrammar"}'
    assert stub.ModelInfer(one, timeout=20).raw_output_contents[0][4:] == b"ayes"
    streamed = list(stub.ModelStreamInfer(iter([one]), timeout=20))
    assert [part.error_message for part in streamed] == [""]


@pytest.mark.parametrize(
    ("raw", "fields", "message"),
    [
        (b"ab", {}, "input 'text_input' ends inside the length of a string"),
        (struct.pack("<I", 9) + b"a", {}, "input 'text_input' ends inside a string of 9 bytes"),
        (struct.pack("<I", 1) + b"\xff", {}, "input 'text_input' is not valid UTF-8"),
        (b"", {}, "input 'text_input' has 0 elements; it must have 1"),
        (b"a", {"datatype": "FP32"}, "input 'text_input' has datatype 'FP32'; it must be BYTES"),
        (b"a", {"name": "image"}, "input 'image' is not known"),
        (b"a", {"shape": [2]}, "input 'text_input' has shape [2]; it must be [1]"),
    ],
)
def test_broken_tensors_are_refused(stub, raw, fields, message):
    code, details = status(lambda: stub.ModelInfer(request(raw, **fields), timeout=20))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith(message)


def test_an_input_that_is_there_twice_is_refused(stub):
    twice = request(contents={"bytes_contents": [b"a"]})
    twice.inputs.append(twice.inputs[0])
    code, details = status(lambda: stub.ModelInfer(twice, timeout=20))
    assert (code, details) == (grpc.StatusCode.INVALID_ARGUMENT, "input 'text_input' is there twice; send it once")


def test_what_is_too_deep_or_fails_is_the_affair_of_its_request(stub, monkeypatch):
    good = request(contents={"bytes_contents": [b"a"]})
    deep = messages.ModelInferRequest()
    deep.CopyFrom(good)
    deep.inputs.add(name="sampling_parameters", datatype="BYTES", shape=[1]).contents.bytes_contents.append(
        b"[" * 100_000
    )
    errors = [response.error_message for response in stub.ModelStreamInfer(iter([good, deep, good]), timeout=20)]
    assert sorted(errors)[:2] == ["", ""]
    assert "input 'sampling_parameters' must be a JSON object: maximum recursion" in max(errors)
    encode, failing = Tokenizer.encode, request(contents={"bytes_contents": [b"defect"]})
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text, **k: encode(self, text, **k) if text == "a" else 1 / 0)
    errors = [response.error_message for response in stub.ModelStreamInfer(iter([good, failing]), timeout=20)]
    assert sorted(errors) == ["", "the server failed; its log says why"]


def test_a_client_that_goes_frees_its_blocks(stub, steps):
    one = request(contents={"bytes_contents": [b"a"]})
    call = stub.ModelStreamInfer(iter([one]), timeout=0.3)
    assert status(lambda: list(call))[0] == grpc.StatusCode.DEADLINE_EXCEEDED
    wait_for(lambda: idle(steps))
    assert len(steps) < 80  # of 120 steps, so the request did not run to its end
