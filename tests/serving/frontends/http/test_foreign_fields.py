"""Fields of OpenAI's and vLLM's APIs that other clients send, and fields that no API has."""

import json
import logging
import re
from dataclasses import replace
from importlib import import_module

import openai
import pytest
import requests

from sharp.serving.api.errors import FieldError
from sharp.serving.api_config import ApiConfig
from sharp.serving.frontends.foreign_fields import OF_COMPLETIONS
from sharp.serving.frontends.http.chat_request import ChatRequest
from sharp.serving.frontends.http.openai_request import CompletionRequest
from sharp.serving.frontends.json_fields import RequestBody
from sharp.serving.frontends.unknown_fields import UnknownFields
from tests.serving.conftest import EOS, write_folder

TEMPLATE = "{{ reasoning_effort }}{% for message in messages %}{{ message.content }}{{ message.mark }}{% endfor %}"
LOGGER = "sharp.serving.frontends.unknown_fields"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_folder(tmp_path_factory.mktemp("models") / "foreign", hashing=0)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def client(start_server, folder):
    with openai.OpenAI(base_url=f"http://{start_server(folder).http_address}/v1", api_key="-", max_retries=0) as client:
        yield client


def complete(client, prompt="a", **body):
    fields = {"temperature": 0, "max_tokens": 4, **body}
    return client.completions.create(model="foreign", prompt=prompt, extra_body=fields, stream=body.get("stream"))


def text(client, prompt="a", **body):
    return complete(client, prompt, **body).choices[0].text


def chat(client, message=None, **body):
    messages = [message or {"role": "user", "content": "a"}]
    fields = {"temperature": 0, "max_tokens": 4, **body}
    return client.chat.completions.create(model="foreign", messages=messages, extra_body=fields)


def body(**fields):
    return json.dumps({"prompt": "a", **fields}).encode()


def test_what_a_newer_client_sends_is_left_out_and_named_once(caplog):
    caplog.set_level(logging.WARNING, LOGGER)
    fields = UnknownFields("warn")
    tools = [{"type": "function", "function": {"name": name, "newer": 1}, "cache": True} for name in "ab"]
    for _ in range(2):
        message = {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}], "its": "own"}
        sent = json.dumps({"messages": [message], "tools": tools, "newest": {"a": [1]}, "stream_options": {"x": 1}})
        request = fields.parse(ChatRequest, sent.encode())
    assert [tool.function.name for tool in request.tools] == ["a", "b"]
    assert request.messages[0].for_template() == {
        "role": "user",
        "content": [{"type": "text", "text": "x"}],
        "its": "own",
    }
    assert sorted(record.args[0] for record in caplog.records) == [
        "newest",
        "stream_options.x",
        "tools.cache",
        "tools.function.newer",
    ]


def test_the_log_of_names_is_bounded(caplog):
    caplog.set_level(logging.WARNING, LOGGER)
    fields = UnknownFields("warn")
    fields.parse(CompletionRequest, body(**{f"field_{number}_{'x' * 500}": 1 for number in range(400)}))
    assert len(caplog.records) == 256
    assert max(len(record.args[0]) for record in caplog.records) == 64


def test_unknown_fields_as_errors_or_ignored(caplog):
    with pytest.raises(FieldError, match=r"newest is not known here$"):
        UnknownFields("error").parse(CompletionRequest, body(newest=1))
    caplog.set_level(logging.WARNING, LOGGER)
    request = UnknownFields("ignore").parse(CompletionRequest, body(newest=1, temprature=0.1))
    assert (request.prompt, request.temperature, caplog.records) == ("a", None, [])


def test_a_field_whose_name_has_several_lines_is_refused_in_one():
    for name, shown in (("ne\nw", "ne\ufffdw is not"), ("n" * 300, "n" * 200 + "... is not")):
        with pytest.raises(FieldError, match=re.escape(shown)):
            UnknownFields("error").parse(CompletionRequest, json.dumps({"prompt": "a", name: 1}).encode())


@pytest.mark.parametrize("policy", ["warn", "ignore"])
def test_what_is_wrong_is_said_before_what_is_unknown(policy):
    with pytest.raises(FieldError, match="n cannot be used: Input should be a valid integer"):
        UnknownFields(policy).parse(CompletionRequest, body(a_new_one=1, n="many"))


MISSPELT = {"temprature": "temperature", "topP": "top_p", "maxTokens": "max_tokens", "stops": "stop"}


@pytest.mark.parametrize(("name", "meant"), MISSPELT.items())
def test_a_misspelt_field_is_an_error(name, meant):
    for policy in ("error", "warn"):
        with pytest.raises(FieldError, match=f"{name} is not known here; did you mean {meant}?"):
            UnknownFields(policy).parse(CompletionRequest, body(**{name: 1}))


@pytest.mark.parametrize("name", ["top_a", "typical_p", "max_output_tokens", "prompt_cache_retention", "xtc_threshold"])
def test_a_field_of_another_server_is_no_misspelling(name):
    assert UnknownFields("warn").parse(CompletionRequest, body(**{name: 1})).prompt == "a"


def test_a_server_that_refuses_unknown_fields(start_server, folder):
    address = start_server(folder, api=ApiConfig(unknown_fields="error")).http_address
    with openai.OpenAI(base_url=f"http://{address}/v1", api_key="-", max_retries=0) as strict:
        with pytest.raises(openai.BadRequestError, match="newest is not known here"):
            text(strict, newest=1)
        assert text(strict) == "bcde"
        assert text(strict, prompt_cache_retention="24h", return_prompt_text=False, moderation={}) == "bcde"
        harmless = {"echo": False, "return_mm_kwargs": True, "routed_experts_prompt_start": 0, "moderation": {}}
        assert chat(strict, **harmless, prompt_cache_options={"a": 1}).choices[0].message.content == "bcde"


def test_every_unsupported_field_is_known_and_those_that_change_nothing_are_named(client, caplog):
    caplog.set_level(logging.WARNING, LOGGER)
    assert text(client, **dict.fromkeys(OF_COMPLETIONS)) == "bcde"
    assert text(client, verbosity="low", prediction={"type": "content"}, best_of=2, user="me") == "bcde"
    assert [record.args for record in caplog.records] == [
        (name, "has no effect here") for name in ("verbosity", "prediction", "best_of")
    ]


REFUSED = [
    ("functions", [{"name": "f"}]),
    ("use_beam_search", True),
    ("return_prompt_text", True),
    ("return_token_offsets", True),
]


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(client, name, value):
    with pytest.raises(openai.BadRequestError, match=name) as caught:
        text(client, **{name: value})
    assert caught.value.param == name


def test_echo_of_a_chat_is_refused_where_it_would_change_the_message(client):
    assert chat(client, echo=True).choices[0].message.content == "bcde"
    with pytest.raises(openai.BadRequestError, match="echo is true; a response does not begin with the last message"):
        chat(client, {"role": "assistant", "content": "a"}, echo=True)
    with pytest.raises(openai.BadRequestError, match="echo is true"):
        chat(client, echo=True, add_generation_prompt=False)


def test_usage_in_every_chunk(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    for only in (options, {"continuous_usage_stats": True}):
        chunks = list(complete(client, ["a", "bb"], n=2, stream=True, stream_options=only))
        seen = {}
        for chunk in chunks[:-1]:
            seen.setdefault(chunk.choices[0].index, []).append(chunk.usage.completion_tokens)
            prompt = 1 if chunk.choices[0].index < 2 else 2
            assert chunk.usage.prompt_tokens == prompt
            assert chunk.usage.total_tokens == prompt + chunk.usage.completion_tokens
        assert set(map(tuple, seen.values())) == {(1, 2, 3, 4, 4)}
        assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 16)
    chunks = list(complete(client, stream=True, stream_options={"include_usage": True}))
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * 5


def test_special_tokens_of_the_text_are_shown_on_request(client):
    fields = {"ignore_eos": True, "max_tokens": 3, "logit_bias": {str(EOS): 100}}
    assert text(client, **fields) == ""
    assert text(client, skip_special_tokens=False, **fields) == "<eos><eos><eos>"
    assert text(client, skip_special_tokens=False) == "bcde"
    # The token that ends the completion does not belong to its text.
    assert text(client, skip_special_tokens=False, logit_bias={str(EOS): 100}) == ""


def test_bad_words_do_not_come(client):
    assert text(client, bad_words=["c"])[:1] == "b"
    assert "c" not in text(client, bad_words=["c"])
    assert text(client, bad_words=["cd"])[:2] == "bc"  # a part of the bad word may come
    assert "cd" not in text(client, bad_words=["cd"])
    assert text(client, bad_words=["b", "cd", "zzzzzzz"])[0] != "b"
    with pytest.raises(openai.BadRequestError, match="bad_words has ' '; each must be a text"):
        text(client, bad_words=[" "])


def test_only_allowed_tokens_come(client):
    assert set(text(client, allowed_token_ids=[120, 121])) <= {"x", "y"}
    assert text(client, allowed_token_ids=[98, 99], guided={"regex": "[bx]{2}"}) == "bb"
    with pytest.raises(openai.BadRequestError, match="no token may follow"):
        text(client, allowed_token_ids=[98], bad_words=["b"])
    with pytest.raises(openai.BadRequestError, match="allowed_token_ids has token id 5000"):
        text(client, allowed_token_ids=[5000])
    assert text(client) == "bcde"  # the server still works


def test_long_prompts_are_cut_on_request(client):
    def read(**fields):
        response = complete(client, "abcdef" + "x" * 200 + "k", echo=True, max_tokens=1, **fields)
        return response.usage.prompt_tokens, response.choices[0].text[-1]

    assert read(truncate_prompt_tokens=3) == (3, "l")
    assert read(truncate_prompt_tokens=3, truncation_side="right") == (3, "d")
    assert read(truncate_prompt_tokens=-1) == (127, "l")
    assert text(client, "ab", truncate_prompt_tokens=50) == "cdef"
    with pytest.raises(openai.BadRequestError, match="truncate_prompt_tokens is 0; it must be -1 or"):
        read(truncate_prompt_tokens=0)


def test_tokens_as_their_ids(client):
    logprobs = complete(client, logprobs=1, return_tokens_as_token_ids=True).choices[0].logprobs
    assert logprobs.tokens == ["token_id:98", "token_id:99", "token_id:100", "token_id:101"]
    assert list(logprobs.top_logprobs[0]) == ["token_id:98"]
    assert logprobs.text_offset == [1 - 1, 1, 2, 3]
    entry = chat(client, logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True).choices[0].logprobs.content[0]
    assert (entry.token, entry.bytes, entry.top_logprobs[0].token) == ("token_id:98", [98], "token_id:98")
    assert complete(client, logprobs=0).choices[0].logprobs.tokens[0] == "b"


def test_the_clients_own_request_id(client):
    assert complete(client, request_id="mine").id == "cmpl-mine"
    # two requests with one id at once are no conflict
    with complete(client, request_id="mine", stream=True, max_tokens=100) as running:
        assert next(running).id == "cmpl-mine"
        assert chat(client, request_id="mine").id == "chatcmpl-mine"


def test_what_the_template_knows_reaches_it(client):
    assert chat(client, reasoning_effort="low").usage.prompt_tokens == len("lowa")
    assert chat(client, documents=[{"title": "t"}]).usage.prompt_tokens == len("a")
    assert chat(client, {"role": "user", "content": "a", "mark": "zz"}).usage.prompt_tokens == len("azz")


def test_the_model_may_be_left_out(client):
    response = client.post("/completions", body={"prompt": "a", "max_tokens": 1, "temperature": 0}, cast_to=dict)
    assert (response["model"], response["choices"][0]["text"]) == ("foreign", "b")


def test_the_other_way_around_in_process(folder, server_settings):
    from sharp import LLM, SamplingParams

    llm = LLM(folder, backend=replace(server_settings.backend))
    params = SamplingParams(temperature=0, max_tokens=2, allowed_token_ids=range(120, 122), bad_words=("x",))
    assert [completion.text for completion in llm.generate(["a"], params)] == ["yy"]


def test_a_reasoning_effort_that_the_template_does_not_read_is_named_in_the_log(start_server, tmp_path, caplog):
    folder = write_folder(tmp_path / "model", hashing=0)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    address = f"http://{start_server(folder).http_address}/v1/chat/completions"
    caplog.set_level(logging.WARNING, LOGGER)
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "reasoning_effort": "low"}
    assert requests.post(address, json=body, timeout=20).status_code == 200
    assert "the field 'reasoning_effort' of a request is not read by the model's chat template" in caplog.text


def test_many_unknown_fields_and_a_wrong_one_are_one_sentence():
    """A body with many unknown fields and one wrong field gives one error.

    The fields of each entry are reported one after the other, so the body is read in many passes.
    """
    tools = [{"type": "function", "function": {"name": "a"}, f"new{number}": 1} for number in range(20)]
    whole = {"messages": [{"role": "user", "content": "a"}], "tools": [*tools, {"type": 7}]}
    with pytest.raises(FieldError):
        UnknownFields("ignore").parse(ChatRequest, json.dumps(whole).encode())


def test_a_refused_field_is_found_beside_many_unknown_ones():
    tools = [{"type": "function", "function": {"name": "a"}, f"new{number}": 1} for number in range(20)]
    whole = {"messages": [{"role": "user", "content": "a"}], "tools": tools}
    assert UnknownFields("warn").parse(ChatRequest, json.dumps(whole).encode()).tools[19].function.name == "a"
    with pytest.raises(FieldError, match="beam search is not supported here"):
        UnknownFields("warn").parse(ChatRequest, json.dumps({**whole, "use_beam_search": True}).encode())


def test_bodies_of_requests_have_fields_of_their_own_and_of_one_base():
    def deepest(kind):
        return 1 + max(map(deepest, kind.__subclasses__()), default=-1)

    import_module("sharp.serving.frontends.http.app")  # and with it every kind of request
    assert deepest(RequestBody) == 2
