"""Fields of requests that KServe and chats share with HTTP.

`test_openai.py` tests the other fields of HTTP.
"""

import json

import openai
import pytest
from pydantic import ValidationError
from transformers.utils.chat_template_utils import render_jinja_template

from sharp.serving.api.errors import FieldError
from sharp.serving.frontends.kserve.inference_request import InferenceFields
from sharp.serving.frontends.unknown_fields import UnknownFields, first_error
from sharp.serving.text.chat_template import ChatTemplate
from tests.serving.conftest import write_folder

TEMPLATE = (
    "{% if thinking is defined and thinking %}{{ thinking.upper() }}{% endif %}"
    "{% for message in messages %}{{ message.role[0] }}{{ message.content }}{{ end }}{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)
QUESTION = {"role": "user", "content": "hi"}
REPLY = {"role": "assistant", "content": "I say "}
# Ways in which templates write a message: unchanged, trimmed, or without the reasoning before `</think>`.
WRITINGS = (
    "{{ m.content }}",
    "{{ m.content | trim }}",
    "{{ '  ' + m.content | trim + '\\n' }}",
    "{{ m.content.split('</think>')[-1] }}",
)


def test_numbers_may_be_strings():
    given = {"temperature": "0.5", "top_k": "3", "max_tokens": "4", "ignore_eos": "true", "logit_bias": {"97": "-1"}}
    given |= {"include_stop_str_in_output": "true", "priority": "2"}
    params = InferenceFields.model_validate(json.loads(json.dumps(given))).params()
    assert (params.temperature, params.top_k, params.max_tokens, params.ignore_eos) == (0.5, 3, 4, True)
    assert params.include_stop_str_in_output is True
    assert params.logit_bias == ((97, -1.0),)
    assert InferenceFields.model_validate({"priority": None, "cache_salt": None}) == InferenceFields()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": False}, "temperature"),
        ({"priority": True}, "priority"),
        ({"stop_token_ids": [True]}, "stop_token_ids.0"),
        ({"logit_bias": {"97": True}}, "logit_bias.97"),
    ],
)
def test_true_is_no_number(fields, field):
    with pytest.raises(ValidationError) as caught:
        InferenceFields.model_validate(fields)
    assert str(first_error(caught.value)) == f"{field} cannot be used: Input should be a number, not true or false"


@pytest.mark.parametrize("policy", ["warn", "error", "ignore"])
def test_what_is_wrong_in_many_places_is_said_once(policy):
    for fields, message in (
        ({"stop_token_ids": [True] * 5000}, "stop_token_ids.0 cannot be used: Input should be a number"),
        ({f"a{number}": 1 for number in range(5000)}, "the body has 5000 fields or entries that cannot be used"),
        ({"guided": {f"a{number}": 1 for number in range(5000)}}, "the body has 5000 fields or entries"),
    ):
        with pytest.raises(FieldError) as caught:
            UnknownFields(policy).parse(InferenceFields, json.dumps(fields).encode())
        assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop": ["a", 5]}, "stop cannot be used: Input should be a text or a list of texts"),
        ({"guided": {"json": 5}}, "guided.json cannot be used: Input should be a JSON schema, or the text of one"),
    ],
)
def test_a_field_of_several_types_says_what_it_takes(fields, message):
    with pytest.raises(ValidationError) as caught:
        InferenceFields.model_validate(fields)
    assert str(first_error(caught.value)) == message


@pytest.fixture(scope="module")
def client(start_server, tmp_path_factory):
    folder = write_folder(tmp_path_factory.mktemp("models") / "chatting", hashing=0)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    address = start_server(folder).http_address
    with openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(client, *messages, **extra):
    """Return the prompt that the server made of a conversation, and the completion."""
    response = client.chat.completions.create(
        model="chatting",
        messages=messages or [QUESTION],
        temperature=0,
        max_completion_tokens=3,
        extra_body={"return_token_ids": True, **extra},
    )
    return bytes(response.model_extra["prompt_token_ids"]).decode(), response.choices[0].message.content


def test_variables_are_the_templates(client):
    assert chat(client) == ("uhia", "bcd")
    assert chat(client, chat_template_kwargs={"thinking": "x", "end": "."}) == ("Xuhi.a", "bcd")
    assert chat(client, chat_template_kwargs={}) == ("uhia", "bcd")


def test_the_completion_may_begin_no_message_or_go_on_with_the_last(client):
    assert chat(client, add_generation_prompt=False) == ("uhi", "jkl")
    fields = {"add_generation_prompt": False, "continue_final_message": True}
    assert chat(client, QUESTION, REPLY, chat_template_kwargs={"end": "."}, **fields) == ("uhi.aI say ", '!"#')
    parts = {**REPLY, "content": [{"type": "text", "text": "I "}, {"type": "text", "text": "say"}]}
    assert chat(client, QUESTION, parts, **fields) == ("uhiaI say", "z{|")


@pytest.mark.parametrize("writing", WRITINGS)
@pytest.mark.parametrize("text", ["I say", " I say \n", "<think>so</think>I say", ""])
def test_a_message_is_continued_as_by_transformers(writing, text):
    source = "{% for m in messages %}<{{ m.role }}>" + writing + "</>{% endfor %}"
    messages = [QUESTION, {**REPLY, "content": text}]
    fields = {"add_generation_prompt": False, "continue_final_message": True}
    try:
        ((expected,), _) = render_jinja_template([messages], chat_template=source, **fields)
    except ValueError:
        with pytest.raises(FieldError, match="the model's chat template does not show all of that message"):
            ChatTemplate(source, {}).render(messages, **fields)
    else:
        assert ChatTemplate(source, {}).render(messages, **fields) == expected


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (
            {"continue_final_message": True},
            "continue_final_message",
            "continue_final_message is true; it needs add_generation_prompt to be false",
        ),
        (
            {"chat_template_kwargs": {"thinking": 1}},
            "messages",
            "messages and chat_template_kwargs do not fit the model's chat template: 'int object' has no attribute",
        ),
        (
            {"chat_template_kwargs": {"tools": []}},
            "chat_template_kwargs",
            "chat_template_kwargs has 'tools', which is set by a field of the request; set that",
        ),
        (
            {"chat_template_kwargs": {"add_generation_prompt": False}},
            "chat_template_kwargs",
            "chat_template_kwargs has 'add_generation_prompt', which is set by a field of the request",
        ),
        (
            {"chat_template_kwargs": {"enable_thinking": False}},
            "chat_template_kwargs",
            "chat_template_kwargs has 'enable_thinking', which cannot be set for the model's chat template; "
            "end, thinking can be",
        ),
        (
            {"chat_template_kwargs": {"raise_exception": 1}},
            "chat_template_kwargs",
            "chat_template_kwargs has 'raise_exception', which cannot be set",
        ),
        (
            {"chat_template_kwargs": []},
            "chat_template_kwargs",
            "chat_template_kwargs cannot be used: Input should be an object",
        ),
        (
            {"modalities": ["text", "audio"]},
            "modalities",
            'modalities is ["text", "audio"]; only ["text"] is supported',
        ),
        ({"modalities": []}, "modalities", 'modalities is []; only ["text"] is supported'),
        (
            {"tool_choice": "sometimes"},
            "tool_choice",
            'tool_choice cannot be used: Input should be "none", "auto", "required" or {"type": "function"',
        ),
    ],
)
def test_a_bad_field_is_named(client, fields, param, message):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **fields)
    assert (caught.value.param, caught.value.body["message"].startswith(message)) == (param, True), caught.value


@pytest.mark.parametrize("content", [5, [{"type": "image_url", "image_url": {"url": "data:"}}], ["hi"]])
def test_only_text_is_taken(client, content):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, {"role": "user", "content": content})
    assert caught.value.param == "messages"
    assert caught.value.body["message"] == (
        'messages.0.content cannot be used: Input should be a text or a list of parts {"type": "text", "text": ...}; '
        "only text parts are supported"
    )


def test_text_is_a_modality(client):
    assert chat(client, modalities=["text"]) == ("uhia", "bcd")


def test_a_template_without_variables_takes_none():
    with pytest.raises(FieldError, match="'x', which cannot be set for the model's chat template; leave it out"):
        ChatTemplate("{{ messages }}", {}).render([], variables={"x": 1})
