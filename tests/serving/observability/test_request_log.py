"""Every request has one line of the log, however it ended."""

import json
import logging
import urllib.error
import urllib.request

import grpc
import pytest

from sharp.kserve import grpc_service_pb2, grpc_service_pb2_grpc
from sharp.serving.api.errors import InputError
from sharp.serving.api.events import Finished, FinishReason, Timing, Usage
from sharp.serving.api.sampling_params import SamplingParams
from sharp.serving.config import ServerConfig
from sharp.serving.observability.request_log import log_prompt, log_request, set_up_logging
from sharp.serving.observability.request_record import RequestOrigin, RequestRecord
from sharp.v1 import inference_pb2, inference_pb2_grpc
from tests.serving.conftest import wait_for
from tests.serving.grpc_client import status
from tests.serving.running_engine import prepared

SECRET = "the secret"


@pytest.fixture
def lines(caplog):
    """Return a function that gives the log lines of requests as dicts."""
    caplog.set_level(logging.INFO, logger="sharp.requests")
    names = {"request_id", "protocol", "outcome", "prompt_tokens", "generated_tokens", "cached_tokens", "error"}
    names |= {"queue_seconds", "first_token_seconds", "total_seconds", "prompt", "model", "trace_id"}
    return lambda: [
        {name: value for name, value in vars(record).items() if name in names}
        for record in caplog.records
        if record.name == "sharp.requests"
    ]


def test_a_line_for_a_whole_request(client, lines, caplog):
    client.generate(SECRET, max_tokens=3, request_id="mine")
    wait_for(lines)
    (line,) = lines()
    assert (line["request_id"], line["protocol"], line["model"]) == ("mine", "grpc", "counting")
    assert (line["outcome"], line["prompt_tokens"], line["generated_tokens"]) == ("length", len(SECRET), 3)
    assert 0 <= line["queue_seconds"] <= line["first_token_seconds"] <= line["total_seconds"]
    assert "error" not in line
    assert "request_id=mine" in caplog.text
    assert SECRET not in caplog.text


def test_a_refused_request_has_its_reason_and_not_its_prompt(client, lines, caplog):
    code, details = status(lambda: client.generate(SECRET, sampling={"temperature": -1}))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    wait_for(lines)
    (line,) = lines()
    assert (line["outcome"], line["error"]) == ("error", details)
    assert SECRET not in caplog.text


def post(started, body, token=None):
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    request = urllib.request.Request(f"http://{started.http_address}/v1/completions", body, headers)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=20)
    return json.loads(refused.value.read())["error"]["message"]


def test_what_a_frontend_refuses_by_itself_has_a_line_too(start_server, counting, tmp_path, lines):
    (tmp_path / "tokens").write_text("good")
    started = start_server(counting, server=ServerConfig(grpc_port=0, http_port=0, token_file=tmp_path / "tokens"))
    told = [
        post(started, b"{"),
        post(started, b'{"prompt": "a", "model": "other"}', "good"),
        post(started, b'{"prompt": 7}', "good"),
    ]
    with grpc.insecure_channel(started.grpc_address) as channel:
        ask = grpc_service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer
        request = grpc_service_pb2.ModelInferRequest(model_name="counting")
        told.append(status(lambda: ask(request, timeout=20))[1])
        good = (("authorization", "Bearer good"),)
        told.append(status(lambda: ask(request, timeout=20, metadata=good))[1])
        generate = inference_pb2_grpc.InferenceServiceStub(channel).Generate
        other = inference_pb2.GenerateRequest(text="a", model="other")
        told.append(status(lambda: list(generate(other, timeout=20, metadata=good)))[1])
    assert [(line["protocol"], line["outcome"], line["error"]) for line in lines()] == [
        (protocol, "error", error)
        for protocol, error in zip(("http", "http", "http", "grpc", "kserve", "grpc"), told, strict=True)
    ]


def test_an_id_cannot_write_lines_of_its_own(client, lines, caplog):
    client.generate("a", max_tokens=1, request_id="x\n2026 INFO sharp.requests: request outcome=length")
    wait_for(lines)
    (record,) = [record for record in caplog.records if record.name == "sharp.requests"]
    assert "\n" not in record.getMessage()


def test_a_long_name_does_not_fill_the_log(client, lines, caplog):
    assert status(lambda: list(client.stream(model="x" * 100_000)))[0] == grpc.StatusCode.NOT_FOUND
    wait_for(lines)
    (record,) = [record for record in caplog.records if record.name == "sharp.requests"]
    assert 1000 < len(record.getMessage()) < 1500


def test_a_client_that_goes_has_cancelled(client, lines, steps):
    stream = client.stream("a", max_tokens=100, request_id="gone")
    next(iter(stream))
    stream.cancel()
    wait_for(lines)
    (line,) = lines()
    assert (line["request_id"], line["outcome"]) == ("gone", "cancelled")


def test_prompts_are_logged_when_requested(connect, counting, lines):
    client = connect(counting, server=ServerConfig(grpc_port=0, http_port=0, grace_seconds=0.2, log_prompts=True))
    client.generate(SECRET, max_tokens=1, request_id="mine")
    wait_for(lambda: len(lines()) == 2)
    assert lines()[1] == {"request_id": "mine", "prompt": SECRET}


def test_lines_of_json(monkeypatch, capsys):
    monkeypatch.setattr(logging.root, "handlers", [])
    level = logging.root.level
    handler = set_up_logging("json")
    served = RequestRecord(RequestOrigin("http"))
    served.request = prepared("one", (1, 2), SamplingParams(), 4)
    served.take(Finished("one", FinishReason.STOP, None, Usage(2, 4), Timing(0.1, 0.2, 0.3), None), 1.0)
    log_request(served, "some-model", "ab" * 16)
    log_prompt(served, None)
    handler.flush()
    logging.root.setLevel(level)
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert (first["level"], first["logger"], first["request_id"]) == ("INFO", "sharp.requests", "one")
    assert (first["outcome"], first["queue_seconds"], first["trace_id"]) == ("stop", 0.1, "ab" * 16)
    assert second["prompt"] == [1, 2]
    assert "time" in first


def test_an_unknown_format_is_refused():
    with pytest.raises(InputError, match="log_format is 'xml'; it must be one of: text, json"):
        ServerConfig(log_format="xml")
