"""`/v1/embeddings` of an exported BERT equals sentence-transformers, for OpenAI's client and as plain JSON."""

import asyncio
import base64
import json
import random
import threading
import urllib.error
import urllib.request
from dataclasses import replace

import grpc
import jsonschema
import numpy as np
import openai
import pytest

from sharp.serving.config import EngineConfig
from sharp.serving.encoder.engine import EncoderEngine
from sharp.serving.encoder_config import EncoderConfig
from sharp.serving.server.server import run_server
from sharp.v1 import inference_pb2
from tests.sentence_encoders import export_encoder, save_sentence_encoder
from tests.serving.conftest import wait_for
from tests.serving.grpc_client import Client

TEXTS = [
    "Licensed under the Apache License",
    "a",
    "",
    "derivative works of the source " * 9,
    "Grüße, you may not use this file except in compliance",
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = save_sentence_encoder(tmp_path_factory.mktemp("encoders") / "bert")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "is_matryoshka": True}))
    return folder


@pytest.fixture(scope="module")
def folder(checkpoint):
    return export_encoder(checkpoint)


@pytest.fixture(scope="module")
def reference(checkpoint):
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(checkpoint), device="cpu")


@pytest.fixture(scope="module")
def server(start_server, folder):
    return start_server(folder)


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"http://{server.http_address}/v1", api_key="-", max_retries=0)


def post(server, path="/v1/embeddings", **body):
    request = urllib.request.Request(f"http://{server.http_address}{path}", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]


def vectors(server, inputs, **fields):
    status, body = post(server, input=inputs, **fields)
    assert status == 200, body
    return np.array([entry["embedding"] for entry in body["data"]])


def test_they_are_those_of_sentence_transformers(client, reference):
    response = client.embeddings.create(model="bert-model", input=TEXTS)  # the client requests base64
    found = np.array([entry.embedding for entry in response.data])
    assert np.abs(found - reference.encode(TEXTS)).max() < 1e-5
    assert [entry.index for entry in response.data] == list(range(len(TEXTS)))
    tokens = sum(len(reference.tokenizer(text)["input_ids"]) for text in TEXTS)
    assert response.usage.prompt_tokens == response.usage.total_tokens == tokens
    assert response.model == "bert-model"


@pytest.mark.parametrize("pooling", ["cls", "last"])
def test_other_pooling_by_a_setting(start_server, folder, checkpoint, pooling):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer

    server = start_server(folder, encoder=EncoderConfig(pooling=pooling, normalize="off"))
    transformer = Transformer(str(checkpoint))
    mode = {"cls": "cls", "last": "lasttoken"}[pooling]
    model = SentenceTransformer(
        modules=[transformer, Pooling(transformer.get_embedding_dimension(), mode)], device="cpu"
    )
    assert np.abs(vectors(server, TEXTS) - model.encode(TEXTS)).max() < 1e-5


def test_texts_and_their_tokens_alone_and_together_are_the_same(server, reference):
    texts = TEXTS[:2]
    ids = [reference.tokenizer(text)["input_ids"] for text in texts]
    expected = vectors(server, texts)
    for inputs, its in (
        (texts[0], expected[:1]),
        (ids[0], expected[:1]),
        (ids, expected),
        (texts[::-1], expected[::-1]),
    ):
        assert np.abs(vectors(server, inputs) - its).max() < 1e-6


def test_fewer_dimensions_are_normalized_again(server):
    whole, part = vectors(server, TEXTS), vectors(server, TEXTS, dimensions=8)
    expected = whole[:, :8] / np.linalg.norm(whole[:, :8], axis=1, keepdims=True)
    assert np.abs(part - expected).max() < 1e-6
    raw = vectors(server, TEXTS, normalize=False)
    assert np.linalg.norm(raw, axis=1).min() > 1.01
    status, error = post(server, input="a", dimensions=49)
    assert (status, error["param"], error["message"]) == (
        400,
        "dimensions",
        "dimensions is 49; it must be from 1 to 48",
    )


def test_base64_has_the_numbers(server):
    _, body = post(server, input="a work", encoding_format="base64")
    found = np.frombuffer(base64.b64decode(body["data"][0]["embedding"]), "<f4")
    assert np.array_equal(found, vectors(server, "a work")[0].astype(np.float32))


def test_a_long_text_is_refused_or_cut_as_the_tokenizer_cuts_it(server, reference):
    long = "the work " * 200
    status, error = post(server, input=["a", long])
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "input")
    assert error["message"].startswith("This model's maximum context length is 128 tokens. However, you requested 402")
    assert np.abs(vectors(server, long, truncate_prompt_tokens=-1) - reference.encode([long])).max() < 1e-5
    short = reference.tokenizer(long, truncation=True, max_length=7)["input_ids"]
    assert np.abs(vectors(server, long, truncate_prompt_tokens=7) - vectors(server, short)).max() < 1e-6
    assert np.abs(vectors(server, short, truncate_prompt_tokens=3) - vectors(server, short[:3])).max() < 1e-6


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "input cannot be used: Field required"),
        ({"input": None}, "input cannot be used: Input should be a text, a list of token ids"),
        ({"input": []}, "input is an empty list"),
        ({"input": [[]]}, "input has an input of 0 tokens"),
        ({"input": [[1], []]}, "input has an input of 0 tokens"),
        ({"input": ["a"] * 2049}, "input has 2049 entries; the limit is 2048"),
        ({"input": [["a"]]}, "input cannot be used"),
        ({"input": {"text": "a"}}, "input cannot be used"),
        ({"input": ["a", 1]}, "input cannot be used"),
        ({"input": [1.5]}, "input cannot be used"),
        ({"input": [True]}, "input cannot be used"),
        ({"input": [-1]}, "input has token id -1"),
        ({"input": [10**30]}, "input has token id 1000"),
        ({"input": [600]}, "input has token id 600; bert-model has ids 0 to 599"),
        ({"input": [5] * 10**6}, "This model's maximum context length is 128 tokens"),
        ({"input": [[5] * 128] * 2048 + [[5]]}, "input has 2049 entries"),
        ({"input": "x" * 600_000}, "input has 600000 characters"),
        ({"input": "\ud800"}, "the body cannot be used: Invalid JSON"),
        ({"input": "a", "dimensions": float("nan")}, "dimensions cannot be used"),
        ({"input": "a", "dimensions": 0}, "dimensions is 0"),
        ({"input": "a", "dimensions": 1.5}, "dimensions cannot be used"),
        ({"input": "a", "dimensions": True}, "dimensions cannot be used"),
        ({"input": "a", "encoding_format": "bytes"}, "encoding_format cannot be used"),
        ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens is -2"),
        ({"input": "a", "truncate_prompt_tokens": 10**12}, "truncate_prompt_tokens is 1000000000000"),
        ({"input": "a work", "truncate_prompt_tokens": 1}, "truncate_prompt_tokens is 1, which is less than"),
        ({"input": "a", "normalize": 2}, "normalize cannot be used"),
        ({"input": "a", "dimension": 8}, "did you mean dimensions"),
    ],
)
def test_what_cannot_be_used_is_one_sentence(server, body, message):
    status, error = post(server, **body)
    assert status == 400, error
    assert message in error["message"]
    assert "\n" not in error["message"]
    assert error["type"] == "invalid_request_error"
    assert post(server, input="a")[0] == 200


def test_other_routes_say_what_there_is(server, start_server, counting):
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
        status, error = post(server, path, prompt="a", messages=[])
        assert (status, error["message"]) == (
            400,
            "bert-model is an encoder and generates no text; it has /v1/embeddings, /v1/rerank and /v1/score",
        )
    decoder = start_server(counting)
    for path in ("/v1/embeddings", "/v1/rerank", "/rerank", "/v2/rerank", "/v1/score", "/score"):
        status, error = post(decoder, path, input="a")
        assert status == 400
        assert error["message"].startswith("counting is a decoder and has no embeddings or scores")
    assert post(server, model="other", input="a")[0] == 404


def test_requests_that_come_together_share_batches(server, reference):
    words = [
        "the",
        "work",
        "of",
        "a",
        "copyright",
        "owner",
        "that",
        "is",
        "submitted",
        "for",
        "inclusion",
        "in",
        "the",
        "work",
        "by",
        "an",
        "individual",
    ]
    generator = random.Random(0)
    requests = [[" ".join(generator.choices(words, k=generator.randint(1, 60)))] for _ in range(48)]
    expected = reference.encode([text for (text,) in requests])
    found = {}

    def ask(number):
        found[number] = vectors(server, requests[number])[0]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert np.abs(np.array([found[number] for number in range(len(requests))]) - expected).max() < 1e-5


def test_a_client_that_goes_leaves_nothing(start_server, folder, monkeypatch):
    began, hold = threading.Event(), threading.Event()
    step = EncoderEngine.step

    def slow(engine):
        began.set()
        hold.wait(10)
        return step(engine)

    monkeypatch.setattr(EncoderEngine, "step", slow)
    server = start_server(folder, engine=EngineConfig(max_sequences=1))
    url = f"http://{server.http_address}/v1/embeddings"
    with pytest.raises(TimeoutError):
        urllib.request.urlopen(url, json.dumps({"input": ["a"] * 50}).encode(), timeout=1)
    assert began.is_set()
    hold.set()
    load = f"http://{server.http_address}/load"
    wait_for(lambda: json.load(urllib.request.urlopen(load))["server_load"] == 0)

    def metric(name):
        metrics = urllib.request.urlopen(f"http://{server.http_address}/metrics").read().decode()
        return next(line for line in metrics.splitlines() if name in line)

    wait_for(lambda: metric('finish_reason="cancelled"').endswith(" 1.0"))
    texts = metric("sharp_encoder_batch_texts_sum")
    assert float(texts.split()[-1]) < 50  # the other texts were never computed


def test_a_full_queue_says_when_to_come_back(start_server, folder, monkeypatch):
    hold = threading.Event()
    step = EncoderEngine.step
    monkeypatch.setattr(EncoderEngine, "step", lambda engine: (hold.wait(0.5), step(engine))[1])
    server = start_server(folder, engine=EngineConfig(max_waiting_requests=1, max_sequences=1))
    results = []
    threads = [threading.Thread(target=lambda: results.append(post(server, input="a"))) for _ in range(6)]
    for thread in threads:
        thread.start()
    wait_for(lambda: any(status == 429 for status, _ in results))
    hold.set()
    for thread in threads:
        thread.join()
    refused = [body for status, body in results if status == 429]
    assert {status for status, _ in results} == {200, 429}
    assert {body["code"] for body in refused} == {"rate_limit_exceeded"}


def test_metrics_count_tokens_and_show_the_heads(start_server, folder):
    server = start_server(folder)
    post(server, input=["the work", "a"])
    text = urllib.request.urlopen(f"http://{server.http_address}/metrics?attention=head").read().decode()
    assert 'sharp_prompt_tokens_total{model="bert-model"} 7.0' in text
    assert 'sharp_requests_total{finish_reason="stop",model="bert-model"} 1.0' in text
    assert text.count("\nsharp_attention_normalized_entropy{") == 2 * 6
    assert post(server, "/health")[0] in (200, 405)
    assert json.load(urllib.request.urlopen(f"http://{server.http_address}/health"))["status"] == "ok"


def test_the_other_apis_say_that_it_generates_nothing(server):
    client = Client(server.grpc_address)
    with pytest.raises(grpc.RpcError) as caught:
        list(client.inference.Generate(inference_pb2.GenerateRequest(text="a"), timeout=20))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "bert-model is an encoder and generates no text" in caught.value.details()
    client.channel.close()
    status, error = post(server, "/v2/models/bert-model/generate", text_input="a")
    assert status == 400
    assert "is an encoder and generates no text" in str(error)


def test_what_came_before_the_end_is_completed(folder, server_settings, monkeypatch):
    step = EncoderEngine.step
    began = threading.Event()
    monkeypatch.setattr(EncoderEngine, "step", lambda engine: (began.set(), began.wait(), step(engine))[2])
    results = []

    async def serve():
        stop = asyncio.Event()
        threads = []

        def ask(started):
            threads.append(threading.Thread(target=lambda: results.append(post(started, input=["a work"] * 300))))
            threads[0].start()

        async def end():
            await asyncio.to_thread(began.wait, 20)
            stop.set()

        settings = replace(server_settings, server=replace(server_settings.server, grace_seconds=10))
        await asyncio.gather(run_server(folder, settings, ask, stop), end())
        threads[0].join(10)

    asyncio.run(serve())
    [(status, body)] = results
    assert (status, len(body["data"])) == (200, 300)


def test_tokens_are_requested(start_server, folder, server_settings, tmp_path):
    (tmp_path / "tokens").write_text("secret\n")
    server = start_server(folder, server=replace(server_settings.server, token_file=tmp_path / "tokens"))
    for path in ("/v1/embeddings", "/v1/rerank", "/rerank", "/v2/rerank", "/v1/score", "/score"):
        assert post(server, path, input="a")[0] == 401


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": ["a", "b"]}),
        ("/v1/embeddings", {"input": "a", "encoding_format": "base64"}),
        ("/v1/score", {"text_1": "a", "text_2": ["b", "c"]}),
        ("/v1/rerank", {"query": "a", "documents": ["b", "c"]}),
    ],
)
def test_responses_are_what_the_description_says(server, path, body):
    with urllib.request.urlopen(f"http://{server.http_address}/openapi.json", timeout=30) as response:
        responses = json.load(response)["paths"][path]["post"]["responses"]
    status, given = post(server, path, **body)
    assert status == 200
    jsonschema.validate(given, responses["200"]["content"]["application/json"]["schema"])
    status, error = post(server, path)
    assert status == 400
    jsonschema.validate({"error": error}, responses["4XX"]["content"]["application/json"]["schema"])
