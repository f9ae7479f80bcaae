"""Bugs about conversations that users of other servers reported, tried on this server; reports.md has the log."""

import json

import openai
import pytest

from tests.serving.conftest import write_folder
from tests.serving.frontends.http.test_tools import TOOL_TEMPLATE, TOOLS

# Llama's template: it refuses messages that have calls but not exactly one, and messages without content.
STRICT_TEMPLATE = (
    "{% for m in messages %}{% if m.tool_calls is defined and m.tool_calls | length != 1 %}"
    "{{ raise_exception('one call only') }}{% endif %}{{ m.role[0] }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{% endfor %}"
    "{{ tools }}{% if add_generation_prompt %}a{% endif %}"
)
CALL = {"id": "call_1", "type": "function", "function": {"name": "w", "arguments": '{"city": "Oslo"}'}}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}
QUESTION = {"role": "user", "content": "a"}


@pytest.fixture(scope="module")
def clients(start_server, tmp_path_factory):
    """Return clients of a server with the template of the tests of tools, and of one with a strict template."""
    made = {}
    for name, template in (("calling", TOOL_TEMPLATE), ("strict", STRICT_TEMPLATE)):
        folder = write_folder(tmp_path_factory.mktemp("models") / name, hashing=0)
        (folder / "chat_template.jinja").write_text(template)
        address = start_server(folder).http_address
        made[name] = openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0)
    yield made
    for client in made.values():
        client.close()


def chat(clients, messages, model="calling", **fields):
    fields = {"temperature": 0, "max_tokens": 3, **fields}
    return clients[model].chat.completions.create(model=model, messages=messages, **fields)


@pytest.mark.parametrize("model", ["calling", "strict"])
@pytest.mark.parametrize(
    "message",
    [
        {"content": "b", "tool_calls": []},
        {"content": "", "tool_calls": None},
        {"content": None, "refusal": None, "tool_calls": None, "function_call": None, "audio": None},
        {"content": [], "tool_calls": [CALL]},
        {"tool_calls": [CALL]},
        {"content": "", "tool_calls": [CALL]},
    ],
    ids=["no calls", "empty text", "null fields", "empty parts", "no content", "empty content"],
)
def test_an_assistants_message_of_any_client_is_history(clients, model, message):
    results = [RESULT] if message.get("tool_calls") else []
    history = [QUESTION, {"role": "assistant", **message}, *results, QUESTION]
    assert chat(clients, history, model).choices[0].message.content == "bcd"


def test_a_text_has_no_field_for_calls(clients):
    body = chat(clients, [QUESTION, {"role": "assistant", "tool_calls": [CALL]}, RESULT], tools=TOOLS).choices[0]
    assert body.message.tool_calls is None
    assert "tool_calls" not in body.message.model_fields_set
    stream = list(chat(clients, [QUESTION], tools=TOOLS, stream=True))
    assert not [chunk for chunk in stream if "tool_calls" in chunk.choices[0].delta.model_fields_set]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "w"}}])
def test_a_stream_of_calls_ends_with_tool_calls(clients, choice):
    fields = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 100}
    chunks = [chunk.choices[0] for chunk in chat(clients, [QUESTION], stream=True, **fields)]
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["tool_calls"]
    calls = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert all(isinstance(call.function.arguments, str) for call in calls)
    assert calls[0].id.startswith("call_")
    whole = chat(clients, [QUESTION], **fields).choices[0].message.tool_calls[0]
    assert isinstance(json.loads(whole.function.arguments), dict)


def test_streamed_calls_have_indices_and_ids_of_their_own(clients):
    again = {str(ord("\n")): 100}  # another call follows wherever the guide allows one
    fields = {"tools": TOOLS[1:], "tool_choice": "required", "max_tokens": 120, "logit_bias": again}
    chunks = [chunk.choices[0] for chunk in chat(clients, [QUESTION], stream=True, **fields)]
    calls = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert [call.index for call in calls] == [0, 1]
    assert calls[0].id != calls[1].id


@pytest.mark.parametrize("content", ["ab", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]])
def test_a_message_to_continue_may_have_parts(clients, content):
    more = {"continue_final_message": True, "add_generation_prompt": False}
    response = chat(clients, [QUESTION, {"role": "assistant", "content": content}], extra_body=more)
    assert response.choices[0].message.content == "cde"
