"""Errors and headers have what clients look for: OpenAI's codes, ids of requests, and CORS for browsers."""

import json
from dataclasses import replace

import openai
import pytest
import requests

from sharp.serving.api.errors import QueueFullError
from sharp.serving.api_config import ApiConfig
from sharp.serving.config import EngineConfig
from sharp.serving.frontends.http.errors import error_body
from tests.serving.conftest import MAX_CONTEXT, write_folder
from tests.serving.frontends.http.test_openai import TEMPLATE

ORIGIN = "https://page.example"
BODY = {"prompt": "a", "max_tokens": 2, "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_folder(tmp_path_factory.mktemp("models") / "clear", hashing=0)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def address(start_server, folder):
    api = ApiConfig(allowed_origins=f"{ORIGIN}, https://other.example", docs=True)
    return f"http://{start_server(folder, api=api).http_address}"


@pytest.fixture(scope="module")
def client(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="-", max_retries=0) as client:
        yield client


def chat(client, text, **fields):
    return client.chat.completions.create(model="clear", messages=[{"role": "user", "content": text}], **fields)


def test_a_prompt_that_is_too_long_is_said_as_openai_says_it(client):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, "x" * 200)
    error = caught.value
    assert (error.code, error.param, error.type) == ("context_length_exceeded", "messages", "invalid_request_error")
    assert error.body["message"] == (
        "This model's maximum context length is 128 tokens. However, you requested 203 tokens (202 in the messages, "
        "1 in the completion). Please reduce the length of the messages or completion."
    )
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="clear", prompt="x" * 200_000)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    assert f"resulted in more than {MAX_CONTEXT} tokens" in caught.value.body["message"]


def test_other_codes(client, address):
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="other", prompt="a")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    status, body = error_body(QueueFullError("full", 1.0))
    assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")


def test_the_id_of_a_request(address):
    for path, body in (("/v1/completions", BODY), ("/v1/completions", {**BODY, "stream": True}), ("/health", None)):
        method = "GET" if body is None else "POST"
        for given in ("a-proxys.id/7", None, "x" * 129, "two words"):
            headers = {} if given is None else {"x-request-id": given}
            response = requests.request(method, address + path, json=body, headers=headers, timeout=10)
            returned = response.headers["x-request-id"]
            assert (returned == given) == (given == "a-proxys.id/7")
            assert len(returned) <= 128
            if body:
                first = response.text.partition("\n")[0].removeprefix("data: ")
                assert json.loads(first)["id"] == f"cmpl-{returned}"
    refused = requests.post(f"{address}/v1/completions", data="{", headers={"x-request-id": "mine"}, timeout=10)
    assert (refused.status_code, refused.headers["x-request-id"]) == (400, "mine")


def test_one_id_may_run_twice(address, client):
    headers = {"x-request-id": "retried"}
    with client.completions.create(
        model="clear", prompt="a", max_tokens=100, stream=True, extra_headers=headers
    ) as one:
        next(one)
        assert requests.post(f"{address}/v1/completions", json=BODY, headers=headers, timeout=10).status_code == 200


def test_browsers_of_allowed_origins_are_admitted(address):
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    for path in ("/v1/chat/completions", "/v1/completions"):
        allowed = requests.options(address + path, headers={**asked, "origin": ORIGIN}, timeout=10)
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, ORIGIN)
        assert "authorization" in allowed.headers["access-control-allow-headers"]
        assert requests.options(address + path, headers={**asked, "origin": "https://x"}, timeout=10).status_code == 403
    for body in (BODY, {**BODY, "stream": True}, {"prompt": []}):
        response = requests.post(f"{address}/v1/completions", json=body, headers={"origin": ORIGIN}, timeout=10)
        assert response.headers["access-control-allow-origin"] == ORIGIN
        assert "x-request-id" in response.headers["access-control-expose-headers"]


def test_without_allowed_origins_no_page_is_admitted(start_server, counting):
    address = f"http://{start_server(counting).http_address}"
    response = requests.post(f"{address}/v1/completions", json=BODY, headers={"origin": ORIGIN}, timeout=10)
    assert "access-control-allow-origin" not in response.headers
    assert requests.get(f"{address}/docs", timeout=10).status_code == 404
    assert requests.get(f"{address}/openapi.json", timeout=10).status_code == 200


def test_origins_as_a_list_of_json():
    assert ApiConfig(allowed_origins='["*"]').origins == ["*"]
    assert ApiConfig(allowed_origins='["https://a", "https://b"]').origins == ["https://a", "https://b"]
    assert ApiConfig().origins == []


def test_the_description_has_every_field(address):
    described = requests.get(f"{address}/openapi.json", timeout=10).json()
    assert described["openapi"] == "3.1.0"
    body = described["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    fields = described["components"]["schemas"][body["$ref"].rpartition("/")[2]]["properties"]
    assert {"messages", "temperature", "structured_outputs", "tools"} <= set(fields)
    references = json.dumps(described).count('"$ref"')
    assert references > 5
    page = requests.get(f"{address}/docs", timeout=10)
    assert ("openapi.json" in page.text, page.headers["content-security-policy"][:18]) == (True, "default-src 'none'")


def test_routes_that_other_tools_ask_for(address):
    for path in ("/ping", "/health", "/health/live", "/health/ready"):
        assert requests.get(address + path, timeout=10).json() == {"status": "ok"}
    assert requests.post(f"{address}/ping", timeout=10).status_code == 200
    assert requests.get(f"{address}/load", timeout=10).json() == {"server_load": 0}
    info = requests.get(f"{address}/tokenizer_info", timeout=10).json()
    assert (info["eos_token"], info["eos_token_id"], info["chat_template"]) == ("<eos>", 256, TEMPLATE)


def test_load_counts_what_runs(start_server, counting, steps, server_settings):
    engine = replace(server_settings.engine, max_sequences=1)
    assert isinstance(engine, EngineConfig)
    address = f"http://{start_server(counting, engine=engine).http_address}"
    body = {**BODY, "max_tokens": 100, "stream": True}
    with requests.post(f"{address}/v1/completions", json=body, stream=True, timeout=10):
        assert requests.get(f"{address}/load", timeout=10).json() == {"server_load": 1}
