"""The server's flags choose a model's name, template, form of tool calls, and form of reasoning."""

import json

import openai
import pytest
import requests

from sharp.serving.api_config import ApiConfig
from tests.serving.conftest import write_folder

TEMPLATE = "{% if tools %}{% endif %}{% for message in messages %}{{ message.content }}{% endfor %}"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "additionalProperties": False}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_folder(tmp_path_factory.mktemp("models") / "formed", hashing=0)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def connect(start_server, folder):
    clients = []

    def to(**api):
        started = start_server(folder, api=ApiConfig(**api))
        clients.append(openai.OpenAI(base_url=f"http://{started.http_address}/v1", api_key="-", max_retries=0))
        return clients[-1]

    yield to
    for client in clients:
        client.close()


def say(client, text, *, stream=False, model="formed", **body):
    """Generate the message that consists of `text`; return the message and the finish reason."""
    body = {"temperature": 0, "guided_choice": [text], "max_tokens": 100, **body}
    messages = [{"role": "user", "content": "a"}]
    response = client.chat.completions.create(model=model, messages=messages, stream=stream, extra_body=body)
    if not stream:
        return response.choices[0].message.to_dict(), response.choices[0].finish_reason
    message, reason = {}, None
    for chunk in response:
        for name, value in chunk.choices[0].delta.to_dict().items():
            message[name] = value if isinstance(value, list) or name == "role" else message.get(name, "") + value
        reason = chunk.choices[0].finish_reason or reason
    return message, reason


def test_several_names(connect):
    client = connect(served_model_name="first, second")
    assert [model.id for model in client.models.list()] == ["first", "second"]
    for name in ("first", "second"):
        assert say(client, "x", model=name)[0]["content"] == "x"
        assert client.models.retrieve(name).root == "first"
    with pytest.raises(openai.NotFoundError, match="the server has 'first' or 'second'"):
        say(client, "x")
    metrics = requests.get(str(client.base_url).replace("/v1/", "/metrics"), timeout=10).text
    assert 'sharp_requests_running{model="first"}' in metrics


def test_a_template_of_the_flag(connect):
    client = connect(chat_template="chatml")
    response = client.chat.completions.create(model="formed", messages=[{"role": "user", "content": "a"}], max_tokens=1)
    assert response.usage.prompt_tokens == len("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n")


def test_a_message_that_the_template_leaves_out_is_named(start_server, tmp_path):
    folder = write_folder(tmp_path / "cutting", hashing=0)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    )
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "a"}]
    body = {"messages": messages, "max_tokens": 1}
    responses = []
    for policy in ("error", "warn"):
        address = start_server(folder, api=ApiConfig(on_dropped_content=policy)).http_address
        responses.append(requests.post(f"http://{address}/v1/chat/completions", json=body, timeout=20))
    assert [response.status_code for response in responses] == [400, 200]
    assert responses[0].json()["error"] == {
        "message": "messages has 2 entries, and the model's chat template leaves out the text of a message of the role "
        "'system', number 1; send it in another role, or start the server with --on-dropped-content warn",
        "type": "invalid_request_error",
        "param": "messages",
        "code": None,
    }
    assert responses[1].json()["usage"]["prompt_tokens"] == 1


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_are_apart(connect, stream):
    client = connect(reasoning_parser="qwen3")
    body = {"max_tokens": 30, "temperature": 0}
    prompt = [{"role": "user", "content": "<think>"}]
    response = client.chat.completions.create(model="formed", messages=prompt, stream=stream, extra_body=body)
    if stream:
        deltas = [chunk.choices[0].delta.to_dict() for chunk in response]
        thought = "".join(delta.get("reasoning_content", "") for delta in deltas)
        assert thought == "".join(delta.get("reasoning", "") for delta in deltas)
        assert "".join(delta.get("content", "") for delta in deltas) == ""
    else:
        message = response.choices[0].message.to_dict()
        thought = message["reasoning_content"]
        assert (message["content"], message["reasoning"]) == ("", thought)
    assert thought.startswith("?@AB")  # the model counts on from ">"


def test_what_must_match_has_no_thoughts(connect):
    client = connect(reasoning_parser="deepseek_r1")
    assert say(client, "x")[0] == {"role": "assistant", "content": "x", "refusal": None}


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_off_does_not_leak(connect, stream):
    client = connect(tool_parser="hermes")
    # Tool calls are required, so the model begins a call, which the limit cuts off.
    for tokens in (5, 14, 20):
        body = {"guided_choice": None, "tools": [TOOL], "tool_choice": "required", "max_tokens": tokens}
        message, reason = say(client, "", stream=stream, **body)
        assert (message.get("content") or "", reason) == ("", "length")
        assert "tool_calls" not in message


@pytest.mark.parametrize("form", ["llama3", "mistral", "pythonic"])
def test_calls_that_must_come_are_read_whatever_the_form(connect, form):
    client = connect(tool_parser=form)
    body = {"guided_choice": None, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    message, reason = say(client, "", **body)
    (call,) = message["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"]), reason) == ("f", {}, "tool_calls")
