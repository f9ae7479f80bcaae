"""OpenAI's Responses API with the `openai` package, and Anthropic's Messages API in the form that its clients read."""

import json

import openai
import pytest
import requests

from sharp.serving.api.errors import FieldError
from sharp.serving.api_config import ApiConfig
from sharp.serving.frontends.http.chat_request import ChatRequest
from sharp.serving.frontends.http.messages_request import MessagesRequest
from sharp.serving.frontends.http.responses_request import ResponsesRequest
from sharp.serving.frontends.unknown_fields import UnknownFields
from tests.serving.conftest import write_folder

TEMPLATE = (
    "{% if tools %}{% endif %}{% for m in messages %}{{ m.role[0] }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{% endfor %}"
)
EMPTY = {"type": "object", "additionalProperties": False}
TOOL = {"type": "function", "name": "f", "parameters": EMPTY}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_folder(tmp_path_factory.mktemp("models") / "responding", hashing=0)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def address(start_server, folder):
    return f"http://{start_server(folder).http_address}/v1"


@pytest.fixture(scope="module")
def client(address):
    with openai.OpenAI(base_url=address, api_key="-", max_retries=0) as client:
        yield client


def respond(client, asked="a", **fields):
    fields = {"temperature": 0, "max_output_tokens": 4, **fields}
    return client.responses.create(model="responding", input=asked, **fields)


def test_a_text(client):
    response = respond(client)
    assert (response.output_text, response.status, response.incomplete_details.reason) == (
        "bcde",
        "incomplete",
        "max_output_tokens",
    )
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (2, 4, 6)
    assert (response.model, response.max_output_tokens, response.object) == ("responding", 4, "response")
    assert respond(client, instructions="xy").usage.input_tokens == len("sxyua")
    assert response.usage.input_tokens_details.cache_write_tokens == 0
    assert "user" not in response.model_fields_set  # OpenAI's description allows a text, and no null
    assert respond(client, user="ann").user == "ann"
    assert respond(client, text={}).text.format.type == "text"
    format_ = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
    assert (
        respond(client, text={"format": format_}).model_dump(by_alias=True, exclude_unset=True)["text"]["format"]
        == format_
    )


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"stop": ["d"]}, "bc"),
        ({"stop": ["d"], "include_stop_str_in_output": True}, "bcd"),
        ({"structured_outputs": {"choice": ["yes"]}}, "yes"),
        ({"logit_bias": {"98": -100}}, ""),
        ({"vllm_xargs": {"a": 1}, "kv_transfer_params": {}, "request_id": "r1"}, "bcde"),
    ],
)
def test_fields_that_vllm_adds(client, more, text):
    response = respond(client, extra_body=more)
    assert response.output_text == text or (text == "" and not response.output_text.startswith("b"))


def test_fields_that_openai_adds_are_known(start_server, folder):
    strict = start_server(folder, api=ApiConfig(unknown_fields="error")).http_address
    with openai.OpenAI(base_url=f"http://{strict}/v1", api_key="-", max_retries=0) as client:
        names = ("prompt_cache_options", "moderation", "access_programs", "background_options", "mm_processor_kwargs")
        added = {
            **{name: {} for name in names},
            "prompt_cache_retention": "24h",
            "context_management": [],
            "image": None,
        }
        assert respond(client, extra_body=added).output_text == "bcde"


def test_a_message_of_a_schema(address):
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 8, "temperature": 0}
    form = {"type": "json_schema", "schema": {"enum": [7]}}
    (block,) = requests.post(
        f"{address}/messages", json={**body, "output_config": {"format": form}}, timeout=20
    ).json()["content"]
    assert block["text"] == "7"
    refused = requests.post(f"{address}/messages", json={**body, "output_config": {"format": "json"}}, timeout=20)
    assert (refused.status_code, "output_config.format must be" in refused.text) == (400, True)


def test_a_field_that_vllm_adds_is_checked(client):
    with pytest.raises(openai.BadRequestError, match="stop cannot be used"):
        respond(client, extra_body={"stop": 7})


def test_a_conversation(client):
    items = [
        {"role": "developer", "content": "x"},
        {"role": "user", "content": [{"type": "input_text", "text": "q"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "k"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "w"}]},
        {"role": "user", "content": "k"},
    ]
    response = respond(client, items)
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert (response.output_text, response.usage.input_tokens) == ("lmno", len("sxuqa" + call + "tkawuk"))


def test_calls(client):
    response = respond(client, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_output_tokens=100)
    (call,) = response.output
    assert (call.type, call.name, json.loads(call.arguments), response.status) == (
        "function_call",
        "f",
        {},
        "completed",
    )
    named = respond(client, tools=[TOOL], tool_choice={"type": "function", "name": "f"}, max_output_tokens=100)
    assert named.output[0].call_id.startswith("call_")


def test_json_by_a_schema(client):
    form = {"format": {"type": "json_schema", "name": "n", "schema": {"const": 12}}}
    assert respond(client, text=form).output_text == "12"


def test_a_stream_is_what_the_package_expects(client):
    with client.responses.stream(model="responding", input="a", temperature=0, max_output_tokens=4) as stream:
        seen = list(stream)
    kinds = [event.type for event in seen]
    assert seen[-1].response.output_text == "bcde"
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds.count("response.output_text.delta") == 4
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    events = list(respond(client, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_a_stream_of_a_call(client):
    fields = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 100}
    events = list(respond(client, stream=True, **fields))
    done = next(event for event in events if event.type == "response.function_call_arguments.done")
    assert json.loads(done.arguments) == {}
    assert events[-1].response.output[0].name == "f"


def test_thoughts_are_items(start_server, folder):
    address = start_server(folder, api=ApiConfig(reasoning_parser="deepseek_r1")).http_address
    with openai.OpenAI(base_url=f"http://{address}/v1", api_key="-", max_retries=0) as client:
        (item,) = respond(client).output
        assert (item.type, item.content[0].text) == ("reasoning", "bcde")
        kinds = [event.type for event in respond(client, stream=True)]
    assert kinds.count("response.reasoning_text.delta") == 4
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "temperature": 0}
    (block,) = requests.post(f"http://{address}/v1/messages", json=body, timeout=10).json()["content"]
    assert (block["type"], block["thinking"]) == ("thinking", "bcde")


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "this server keeps no responses"),
        ({"extra_body": {"context_management": [{}]}}, "context_management", "a conversation is not compacted here"),
        ({"extra_body": {"previous_response": {}}}, "previous_response", "this server keeps no responses"),
        (
            {"extra_body": {"previous_input_messages": [{}]}},
            "previous_input_messages",
            "the whole conversation in input",
        ),
        ({"extra_body": {"enable_response_messages": True}}, "enable_response_messages", "a response has no messages"),
        ({"extra_body": {"image": {}}}, "image", "only text is supported"),
        ({"background": True}, "background", "this server keeps no responses"),
        ({"tools": [{"type": "web_search"}]}, "tools", "tools has one of type 'web_search'"),
        ({"max_output_tokens": -1}, "max_output_tokens", "max_output_tokens is -1"),
        ({"temperature": -1}, "temperature", "temperature is -1"),
        ({"input": [{"role": "user"}]}, "input", "input.0 has no 'content'"),
        ({"input": [{"type": "image_generation_call"}]}, "input", "input.0 is of type 'image_generation_call'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "a part of type 'input_image'"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools", "tools.0.function.name cannot be used"),
        ({"input": [{"role": ["user"], "content": "a"}]}, "input", "input.0.role must be a text"),
        ({"input": "x" * 200}, "input", "Please reduce the length of the input"),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "x"}}}},
            "text.format",
            "text.format",
        ),
    ],
)
def test_what_cannot_be_is_named(client, fields, param, message):
    fields = {"asked": fields.pop("input", "a"), **fields}
    with pytest.raises(openai.BadRequestError) as caught:
        respond(client, **fields)
    assert (caught.value.param, message in str(caught.value)) == (param, True), str(caught.value)


def test_settings_that_are_zero_or_false_come_back_as_they_were_sent(client):
    response = respond(client, "a", temperature=0, parallel_tool_calls=False)
    assert (response.temperature, response.parallel_tool_calls) == (0, False)


def test_an_empty_conversation_is_an_error_of_its_own_field():
    empty = FieldError("prompt", "prompt has 0 tokens; it must have at least 1")
    body = {"messages": [{"role": "user", "content": ""}]}
    made = ChatRequest.model_validate(body), ResponsesRequest.model_validate({"input": ""}).generation()
    for request, field in zip(made, ("messages", "input"), strict=True):
        error = request.renamed(empty)
        assert (error.field, str(error)) == (field, f"the prompt of {field} has 0 tokens; it must have at least 1")


def message(address, headers=None, **fields):
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "temperature": 0, **fields}
    return requests.post(f"{address}/messages", json=body, headers=headers, timeout=20)


def events(response):
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]


def test_fields_that_anthropic_adds_are_known():
    more = {"cache_control": {"type": "ephemeral"}, "inference_geo": "eu", "speed": "fast", "diagnostics": {}}
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "workspace_id": "w", **more}
    UnknownFields("error").parse(MessagesRequest, json.dumps(body).encode())


def test_a_message(address):
    response = message(address, system=[{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]).json()
    assert (response["content"], response["stop_reason"]) == ([{"type": "text", "text": "bcde"}], "max_tokens")
    assert response["usage"]["input_tokens"] == len("sxua")
    stopped = message(address, stop_sequences=["d"]).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "d")


def test_a_streamed_message(address):
    found = events(message(address, stream=True))
    assert [event["type"] for event in found] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 4,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert found[-2]["usage"]["output_tokens"] == 4


def test_a_message_with_tools(address):
    tools = [{"name": "f", "description": "d", "input_schema": EMPTY}]
    choice = {"type": "any", "disable_parallel_tool_use": True}
    fields = {"tools": tools, "tool_choice": choice, "max_tokens": 100}
    response = message(address, **fields).json()
    (block,) = response["content"]
    assert (block["name"], block["input"], response["stop_reason"]) == ("f", {}, "tool_use")
    found = events(message(address, stream=True, **fields))
    assert found[1]["content_block"]["name"] == "f"
    assert json.loads(found[2]["delta"]["partial_json"]) == {}
    turns = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": [{"type": "text", "text": "w"}, {**block, "id": "t"}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "k"}]},
    ]
    assert message(address, messages=turns, tools=tools).json()["content"][0]["text"] == "lmno"


def test_tokens_are_counted_before_a_message_is_sent(address):
    def count(**fields):
        body = {"messages": [{"role": "user", "content": "ab"}], **fields}
        return requests.post(f"{address}/messages/count_tokens", json=body, timeout=20)

    said = message(address, messages=[{"role": "user", "content": "ab"}], system="xyz").json()["usage"]["input_tokens"]
    assert count(system="xyz").json() == {"input_tokens": said}
    refused = count(model="other")
    assert (refused.status_code, refused.json()["error"]["type"]) == (404, "not_found_error")
    assert "messages" in count(messages=[]).json()["error"]["message"]
    unnamed = count(tools=[{"input_schema": EMPTY}])
    assert (unnamed.status_code, "name" in unnamed.json()["error"]["message"]) == (400, True)


INVALID = "invalid_request_error"


def test_refusals_are_anthropics(address):
    for fields, status, kind in (
        ({"max_tokens": None}, 400, "invalid_request_error"),
        ({"model": "other"}, 404, "not_found_error"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid_request_error"),
        *(
            ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": content}]}]}, 400, INVALID)
            for content in (7, {"type": "text"}, ["text"])
        ),
        ({"tool_choice": {"type": "some"}}, 400, "invalid_request_error"),
    ):
        refused = message(address, **fields)
        assert (refused.status_code, refused.json()["type"], refused.json()["error"]["type"]) == (status, "error", kind)


def test_the_key_of_anthropics_clients(start_server, folder, server_settings):
    from dataclasses import replace

    address = f"http://{start_server(folder, server=replace(server_settings.server, api_key='secret')).http_address}/v1"
    assert message(address, {"x-api-key": "secret"}).status_code == 200
    refused = message(address, {"x-api-key": "other"})
    assert refused.status_code == 401
