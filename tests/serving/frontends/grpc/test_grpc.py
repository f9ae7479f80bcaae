import asyncio
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from sharp.serving.api.errors import EngineError, InputError
from sharp.serving.config import EngineConfig, ServerConfig
from sharp.serving.engine.engine import Engine
from sharp.serving.server.server import run_server
from sharp.v1 import control_pb2, inference_pb2
from tests.serving.conftest import idle, wait_for
from tests.serving.grpc_client import Client, status


def test_the_stream_is_prompt_info_then_deltas_then_finished(client):
    messages = list(client.stream("ab", request_id="mine"))
    assert messages[0].prompt_info == inference_pb2.PromptInfo(
        request_id="mine", model="counting", prompt_tokens=2, cached_tokens=0
    )
    assert [(message.delta.text, list(message.delta.token_ids)) for message in messages[1:-1]] == [
        (letter, [ord(letter)]) for letter in "cdefghij"
    ]
    finished = messages[-1].finished
    assert (finished.index, finished.last) == (0, True)
    assert finished.reason == inference_pb2.FINISH_REASON_LENGTH
    assert finished.usage == inference_pb2.Usage(prompt_tokens=2, completion_tokens=8)
    assert 0 < finished.timing.queue_seconds <= finished.timing.time_to_first_token_seconds
    assert finished.timing.time_to_first_token_seconds <= finished.timing.total_seconds
    assert not finished.HasField("attention_stats")
    assert finished.WhichOneof("matched") is None


def test_what_stopped_it_is_said(client):
    text, finished = client.generate(stopping={"stop": ["ef"]})
    assert (text, finished.reason, finished.stop_string) == ("bcd", inference_pb2.FINISH_REASON_STOP, "ef")
    text, finished = client.generate(stopping={"stop_token_ids": [100]})
    assert (text, finished.reason, finished.stop_token_id) == ("bc", inference_pb2.FINISH_REASON_STOP, 100)


def test_zero_and_unset_differ(client):
    assert client.generate(stopping={"max_tokens": 0})[1].usage.completion_tokens == 0
    assert client.generate(stopping={})[1].usage.completion_tokens == 127


def test_token_ids_and_attention(client):
    _, finished = client.generate(token_ids={"ids": [1, 2, 3]}, max_tokens=2, response={"attention_stats": True})
    assert finished.attention_stats.tokens == 4
    assert finished.attention_stats.layers[0].normalized_entropy == pytest.approx([1, 0.5])


def test_the_seed_repeats_the_completion(client):
    def ask(seed):
        return client.generate(max_tokens=40, sampling={"temperature": 3, "seed": seed})[0]

    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(ask, [1, 2, 1, 2, 1, 2, 1, 2]))
    assert len(set(texts)) == 2


def test_concurrent_clients_get_their_own_completions(connect, hashing, expected_hashing):
    client = connect(hashing, engine=EngineConfig(cache_tokens=64, max_batch_tokens=8, max_sequences=8))
    prompts = [[number, 2 * number + 1, 7] for number in range(12)]

    def ask(prompt):
        messages = list(client.stream(token_ids={"ids": prompt}, max_tokens=30))
        return [token for message in messages for token in message.delta.token_ids]

    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(ask, prompts)) == [expected_hashing(prompt, 30) for prompt in prompts]


INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("fields", "code", "message"),
    [
        ({"stopping": {"max_tokens": -1}}, INVALID, "max_tokens is -1; it must be a number at least 0"),
        ({"sampling": {"temperature": float("nan")}}, INVALID, "temperature is nan; it must be a number at least 0"),
        ({"sampling": {"temperature": -1}}, INVALID, "temperature is -1.0; it must be a number at least 0"),
        ({"sampling": {"top_p": 2}}, INVALID, "top_p is 2.0; it must be a number more than 0 and at most 1"),
        ({"sampling": {"top_k": -2}}, INVALID, "top_k is -2; it must be a number at least -1"),
        ({"stopping": {"stop": [""]}}, INVALID, "stop has ''; each stop string must have at least one character"),
        ({"text": ""}, INVALID, "prompt has 0 tokens; it must have at least 1"),
        (
            {"text": "x" * 500},
            INVALID,
            "prompt has 500 tokens; the limit is 127 (a context of 128 with room for one new token)",
        ),
        ({"token_ids": {"ids": [5, 999]}}, INVALID, "prompt has token id 999; counting has ids 0 to 256"),
        ({"request_id": "x" * 300}, INVALID, "request_id has 300 characters; the limit is 256"),
        ({"model": "other"}, grpc.StatusCode.NOT_FOUND, "model 'other' is not served here; the server has 'counting'"),
    ],
)
def test_bad_requests_name_the_field_the_value_and_the_limit(client, fields, code, message):
    assert status(lambda: list(client.stream(**fields))) == (code, message)
    assert client.generate()[0] == "bcdefghi"


def test_a_request_without_a_prompt(client):
    call = client.inference.Generate(inference_pb2.GenerateRequest())
    assert status(lambda: list(call)) == (INVALID, "prompt is not set; set text or token_ids")


@pytest.mark.parametrize("letter", ["x", "é", "😀"])
def test_an_error_about_a_long_name_arrives(client, letter):
    code, details = status(lambda: list(client.stream(model=letter * 20_000)))
    assert code == grpc.StatusCode.NOT_FOUND
    assert details.startswith(f"model '{letter}{letter}")
    assert details.endswith(f"{letter} ...")


def test_a_text_that_is_much_too_long_is_refused_fast(client):
    assert status(lambda: list(client.stream("x" * 10**6, timeout=5))) == (
        INVALID,
        "prompt has 1000000 characters, which is far more than 128 tokens, the limit",
    )
    code, _ = status(lambda: list(client.stream("x" * (60 << 20), timeout=5)))
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_tokenize(client, connect, ids_only):
    assert list(client.inference.Tokenize(inference_pb2.TokenizeRequest(text="abc")).token_ids) == [97, 98, 99]
    request = inference_pb2.TokenizeRequest(text="abc", model="other")
    assert status(lambda: client.inference.Tokenize(request))[0] == grpc.StatusCode.NOT_FOUND
    request = inference_pb2.TokenizeRequest(text="a" * (2**19 + 1))
    code, details = status(lambda: client.inference.Tokenize(request))
    assert code == grpc.StatusCode.INVALID_ARGUMENT and "has 524289 characters; the limit is 524288" in details
    without = connect(ids_only)
    assert status(lambda: without.inference.Tokenize(inference_pb2.TokenizeRequest(text="abc")))[0] == INVALID
    assert status(lambda: list(without.stream("abc"))) == (
        INVALID,
        "prompt is text, and ids-only has no tokenizer; send token ids",
    )


def test_a_running_id_is_taken_and_stays_with_its_owner(client, steps):
    first = client.stream(request_id="same", max_tokens=20)
    assert next(first).prompt_info.request_id == "same"
    code, message = status(lambda: list(client.stream(request_id="same")))
    assert code == grpc.StatusCode.ALREADY_EXISTS
    assert message == "request_id 'same' belongs to a request that is still running"
    assert sum(len(message.delta.token_ids) for message in first) == 20


def test_abort_ends_the_stream(client, steps):
    stream = client.stream(request_id="long", max_tokens=100)
    next(stream), next(stream)
    request = control_pb2.AbortRequest(request_id="long")
    client.control.Abort(request)
    assert list(stream)[-1].finished.reason == inference_pb2.FINISH_REASON_CANCELLED
    assert len(steps) < 10
    assert status(lambda: client.control.Abort(request)) == (
        grpc.StatusCode.NOT_FOUND,
        "request_id 'long' is not running",
    )
    assert status(lambda: client.control.Abort(control_pb2.AbortRequest()))[0] == INVALID


@pytest.mark.parametrize("leave", ["cancel", "deadline", "connection"])
def test_a_client_that_goes_frees_its_blocks(connect, counting, steps, leave):
    client = connect(counting)
    stream = client.stream(max_tokens=100, timeout=0.3 if leave == "deadline" else 20)
    next(stream), next(stream)
    if leave == "cancel":
        stream.cancel()
    elif leave == "connection":
        client.channel.close()
    else:
        assert status(lambda: list(stream))[0] == grpc.StatusCode.DEADLINE_EXCEEDED
    left_at = len(steps)
    wait_for(lambda: idle(steps))
    assert len(steps) < 60  # of 100 steps, so the request did not run to its end
    assert len(steps) - left_at <= 3


def test_a_client_that_does_not_read_is_stopped(connect, counting, steps):
    client = connect(counting, server=ServerConfig(grpc_port=0, http_port=0, max_unread_messages=0, grace_seconds=0))
    assert status(lambda: list(client.stream(max_tokens=100)))[0] == grpc.StatusCode.RESOURCE_EXHAUSTED
    wait_for(lambda: idle(steps))
    assert len(steps) < 10


def test_an_engine_failure_is_internal_and_the_server_goes_on(client, monkeypatch):
    from sharp.serving.backends.onnxruntime import OnnxRuntimeBackend

    with monkeypatch.context() as patch:
        patch.setattr(OnnxRuntimeBackend, "step", lambda self, batch: 1 / 0)
        assert status(lambda: list(client.stream())) == (
            grpc.StatusCode.INTERNAL,
            "a step of the engine failed: division by zero",
        )
    assert client.generate()[0] == "bcdefghi"


def test_server_and_model_info(client):
    info = client.info()
    assert (list(info.models), info.backend, info.kernels, info.block_size) == (["counting"], "onnxruntime", False, 4)
    assert (info.cache_tokens, info.max_batch_tokens, info.max_sequences) == (32768, 2048, 64)
    model = client.control.GetModelInfo(control_pb2.GetModelInfoRequest())
    assert (model.name, model.norm.name, model.q_heads, model.max_context) == ("counting", "softmax", 2, 128)
    assert (model.tokenizer, list(model.eos_token_ids)) == (True, [256])
    accepts = model.accepts
    assert (accepts.text, accepts.guided, accepts.n, accepts.logprobs, accepts.stop_strings) == (
        True,
        True,
        128,
        20,
        64,
    )
    other = control_pb2.GetModelInfoRequest(model="other")
    assert status(lambda: client.control.GetModelInfo(other))[0] == grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("service", ["", "sharp.v1.InferenceService", "sharp.v1.ControlService"])
def test_health(client, service):
    response = health_pb2_grpc.HealthStub(client.channel).Check(health_pb2.HealthCheckRequest(service=service))
    assert response.status == health_pb2.HealthCheckResponse.SERVING


def test_reflection(client):
    services = ProtoReflectionDescriptorDatabase(client.channel).get_services()
    assert {"sharp.v1.InferenceService", "sharp.v1.ControlService", "grpc.health.v1.Health"} <= set(services)


@pytest.mark.parametrize("port", ["grpc_port", "http_port"])
def test_a_port_in_use(start_server, counting, port):
    started = start_server(counting)
    address = started.grpc_address if port == "grpc_port" else started.http_address
    ports = {"grpc_port": 0, "http_port": 0, port: int(address.rpartition(":")[2])}
    with pytest.raises(InputError, match=f"cannot listen on {address}: Address already in use; choose another --"):
        start_server(counting, server=ServerConfig(**ports))


def test_a_server_whose_engine_ends_ends_too(counting, server_settings, monkeypatch):
    def ask(address):
        return status(lambda: list(Client(address).stream()))

    asked = []
    with ThreadPoolExecutor(1) as pool, monkeypatch.context() as patch:
        patch.setattr(Engine, "report", lambda engine: 1 / 0)
        server = run_server(
            counting,
            server_settings,
            lambda started: asked.append(pool.submit(ask, started.grpc_address)),
            asyncio.Event(),
        )
        with pytest.raises(EngineError, match="the engine has ended; the log says why"):
            asyncio.run(server)
        assert asked[0].result(10) == (grpc.StatusCode.INTERNAL, "the engine has stopped")
