"""The `openai` package, unchanged, against the server."""

import json
import urllib.request
from dataclasses import replace

import numpy as np
import onnx
import openai
import pytest
from onnx import numpy_helper

from sharp.serving.api.attention import json_numbers
from sharp.serving.api.errors import FieldError, InputError
from sharp.serving.config import EngineConfig
from sharp.serving.frontends.http import openai_request
from sharp.serving.text.chat_template import ChatTemplate, load_chat_template
from tests.serving.conftest import MAX_CONTEXT, idle, wait_for, write_folder

TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] }}{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)


@pytest.fixture(scope="module")
def chatting(tmp_path_factory):
    """Return a folder of the counting model with a chat template."""
    folder = write_folder(tmp_path_factory.mktemp("models") / "chatting", hashing=0)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<eos>"}}))
    return folder


@pytest.fixture(scope="module")
def started(start_server, chatting):
    return start_server(chatting)


def connect(started):
    return openai.OpenAI(base_url=f"http://{started.http_address}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def client(started):
    with connect(started) as client:
        yield client


def complete(client, prompt="a", **fields):
    fields = {"temperature": 0, "max_tokens": 4, **fields}
    return client.completions.create(model="chatting", prompt=prompt, **fields)


def chat(client, text="hi", **fields):
    fields = {"temperature": 0, "max_completion_tokens": 4, **fields}
    return client.chat.completions.create(model="chatting", messages=[{"role": "user", "content": text}], **fields)


def test_models_and_health(client, started):
    assert [model.id for model in client.models.list()] == ["chatting"]
    extra = client.models.retrieve("chatting").model_extra
    assert (extra["max_model_len"], extra["root"]) == (MAX_CONTEXT, "chatting")
    with pytest.raises(openai.NotFoundError, match="model 'other' is not served here"):
        client.models.retrieve("other")
    with urllib.request.urlopen(f"http://{started.http_address}/health", timeout=10) as response:
        assert json.load(response) == {"status": "ok"}


def test_completion(client):
    response = complete(client)
    choice = response.choices[0]
    assert (choice.text, choice.finish_reason, response.object, response.model) == (
        "bcde",
        "length",
        "text_completion",
        "chatting",
    )
    assert (response.usage.prompt_tokens, response.usage.completion_tokens, response.usage.total_tokens) == (1, 4, 5)
    assert complete(client, stop="d").choices[0].finish_reason == "stop"
    assert complete(client, max_tokens=None).usage.completion_tokens == 16


@pytest.mark.parametrize("stream", [False, True])
def test_attention_statistics_on_demand(client, stream):
    fields = {"stream": stream, "extra_body": {"attention_stats": True, "cache_salt": str(stream)}}
    # The prompts have 3 and 4 tokens. The last new token attends to nothing, because it is not computed.
    for response in (complete(client, "abc", **fields), chat(client, "b", max_completion_tokens=3, **fields)):
        response = list(response)[-1] if stream else response
        stats = response.choices[0].model_extra["attention_stats"]
        assert stats["tokens"] == 6
        (layer,) = stats["layers"]
        assert layer["normalized_entropy"] == pytest.approx([1, 0.5])
        assert layer["entropy_nats"] == pytest.approx([np.log(range(1, 7)).mean(), np.log(range(1, 7)).mean() / 2])
        assert layer["support_ratio"] == pytest.approx([1, 0.5])
        assert layer["inverse_temperature"] == pytest.approx([1, 2])
        assert layer["logit_spread"] == pytest.approx([1, 1])
    assert "attention_stats" not in complete(client).choices[0].model_extra


def test_attention_statistics_of_every_token_of_a_stream(client):
    fields = {"stream": True, "extra_body": {"attention_stats": "tokens"}}
    for chunks, first in (
        (complete(client, "abc", **fields), 2),
        (chat(client, "b", max_completion_tokens=4, **fields), 3),
    ):
        found = [
            chunk.choices[0].model_extra["attention_stats"]
            for chunk in chunks
            if "attention_stats" in (chunk.choices[0].model_extra or {})
        ]
        *tokens, whole = found
        assert whole["tokens"] == first + 4
        # A token is sampled after the query before it. The first token is sampled after the last token of the prompt.
        assert [place for attention in tokens for place in attention["positions"]] == list(range(first, first + 4))
        assert all(heads == [[1, 0.5]] for attention in tokens for heads in attention["normalized_entropy"])


@pytest.mark.parametrize("given", ["token", 2, []])
def test_a_misspelt_kind_of_attention_statistics_is_told_the_kinds(client, given):
    with pytest.raises(
        openai.BadRequestError, match=r"attention_stats.*: Input should be True, False or 'tokens'"
    ) as caught:
        complete(client, stream=True, extra_body={"attention_stats": given})
    assert caught.value.param == "attention_stats"


def test_attention_of_tokens_needs_a_stream(client):
    with pytest.raises(openai.BadRequestError, match="attention_stats is 'tokens'; it needs stream to be true"):
        complete(client, extra_body={"attention_stats": "tokens"})


def test_a_number_that_does_not_exist_is_null(client):
    response = complete(client, "a", max_tokens=1, extra_body={"attention_stats": True, "cache_salt": "alone"})
    stats = response.choices[0].model_extra["attention_stats"]
    # ln 1 = 0, so the normalized entropy does not exist
    assert (stats["tokens"], stats["layers"][0]["normalized_entropy"]) == (1, [None, None])
    # Such a number is, for example, the spread of a row with a logit of -infinity.
    assert json_numbers(np.array([[1.5, np.inf], [np.nan, -np.inf]])) == [[1.5, None], [None, None]]


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_and_completions_keep_their_order(client, stream):
    for prompts in (["a", "k"], [[97], [107]]):
        response = complete(client, prompts, n=2, stream=stream)
        texts = ["", "", "", ""]
        for part in response if stream else [response]:
            for choice in part.choices:
                texts[choice.index] += choice.text
        assert texts == ["bcde", "bcde", "lmno", "lmno"]


def test_a_streamed_completion_ends_with_its_usage(client):
    chunks = list(complete(client, stream=True, stream_options={"include_usage": True}))
    assert [chunk.choices[0].text for chunk in chunks[:-1]] == ["b", "c", "d", "e", ""]
    assert chunks[-2].choices[0].finish_reason == "length"
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 4)
    assert all("usage" in chunk.model_fields_set and chunk.usage is None for chunk in chunks[:-1])
    assert not any("usage" in chunk.model_fields_set for chunk in complete(client, stream=True))


def test_logprobs(client):
    logprobs = complete(client, logprobs=2).choices[0].logprobs
    assert logprobs.tokens == ["b", "c", "d", "e"]
    assert logprobs.top_logprobs[0]["b"] == logprobs.token_logprobs[0] > -2
    entries = chat(client, logprobs=True, top_logprobs=1).choices[0].logprobs.content
    assert [(entry.token, entry.bytes, entry.top_logprobs[0].token) for entry in entries[:2]] == [
        ("b", [98], "b"),
        ("c", [99], "c"),
    ]
    streamed = [chunk.choices[0].logprobs for chunk in chat(client, logprobs=True, stream=True)]
    assert [found.content[0].token for found in streamed if found] == ["b", "c", "d", "e"]


def test_the_logprob_of_a_token_that_cannot_come_is_a_number(start_server, tmp_path):
    folder = write_folder(tmp_path / "certain", hashing=0)
    model = onnx.load(folder / "model.onnx")
    for constant in model.graph.initializer:
        if numpy_helper.to_array(constant).tolist() == [0, 4]:
            constant.CopyFrom(numpy_helper.from_array(np.array([-np.inf, 4], np.float32), constant.name))
    onnx.save(model, folder / "model.onnx")
    with connect(start_server(folder)) as client:
        whole = client.completions.create(model="certain", prompt="a", max_tokens=1, logprobs=2)
        assert whole.choices[0].logprobs.top_logprobs == [{"b": 0, "\0": -9999}]
        parts = client.completions.create(model="certain", prompt="a", max_tokens=1, logprobs=2, stream=True)
        assert next(parts).choices[0].logprobs.top_logprobs == [{"b": 0, "\0": -9999}]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_repeats_the_prompt_with_its_logprobs(client, stream):
    def told(prompt, **fields):
        """Return the text, tokens and logprobs of every choice."""
        choices = {}
        response = complete(client, prompt, echo=True, stream=stream, **fields)
        for part in response if stream else [response]:
            for choice in part.choices:
                one = choices.setdefault(choice.index, ["", [], [], []])
                one[0] += choice.text
                if choice.logprobs:
                    one[1] += choice.logprobs.tokens
                    one[2] += choice.logprobs.token_logprobs
                    one[3] += choice.logprobs.top_logprobs
        return [choices[index] for index in range(len(choices))]

    assert [choice[0] for choice in told([[97, 98], [107, 108]], n=2)] == ["abcdef", "abcdef", "klmnop", "klmnop"]
    ((text, tokens, values, tops),) = told("ax", logprobs=1, max_tokens=2)
    assert (text, tokens) == ("axyz", ["a", "x", "y", "z"])
    assert (values[0], tops[0]) == (None, None)  # nothing predicts the first token
    assert tops[1]["b"] - values[1] == pytest.approx(4)  # "x" after "a" is unlikely
    assert tops[2]["y"] == values[2] > -2
    # Evaluation harnesses request the prompt's own log-probabilities and no new token.
    ((text, tokens, values, _),) = told("abc", logprobs=0, max_tokens=0)
    assert (text, tokens) == ("abc", ["a", "b", "c"])
    assert values[1] == values[2] > -2


def test_chat_whole_and_streamed(client):
    response = chat(client)
    assert (response.choices[0].message.role, response.choices[0].message.content) == ("assistant", "bcde")
    # The template makes "uhi" and "a", with one special token between them.
    assert response.usage.prompt_tokens == 5
    chunks = list(chat(client, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "bcde"
    assert chunks[-1].choices[0].finish_reason == "length"
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert chat(client, parts).usage.prompt_tokens == 5


def test_structured_output_and_our_own_parameters(client):
    schema = {"type": "json_schema", "json_schema": {"name": "number", "schema": {"const": 12}}}
    assert chat(client, response_format=schema).choices[0].message.content == "12"
    assert complete(client, extra_body={"guided": {"regex": "[xyz]{2}"}}).choices[0].text in ("xx", "xy")
    assert complete(client, temperature=3, extra_body={"top_k": 1}).choices[0].text == "bcde"
    assert complete(client, logit_bias={"120": 100}).choices[0].text == "xxxx"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"temperature": -1}, "temperature", "temperature is -1.0; it must be a number at least 0"),
        (
            {"prompt": "x" * 200},
            "prompt",
            "This model's maximum context length is 128 tokens. However, you requested 201",
        ),
        ({"prompt": []}, "prompt", "prompt is an empty list"),
        ({"prompt": ["a"] * 257}, "prompt", "prompt has 257 prompts; the limit is 256"),
        ({"n": "many"}, "n", "n cannot be used: Input should be a valid integer"),
        ({"echo": "yes, please"}, "echo", "echo cannot be used"),
        ({"suffix": "z"}, "suffix", "suffix is set, and the model has no tokens to fill in the middle; leave it out"),
        ({"best_of": 1, "n": 2}, "best_of", "best_of is 1; it must be at least n, which is 2"),
        ({"extra_body": {"temprature": 1}}, "temprature", "temprature is not known here; did you mean temperature?"),
        ({"max_tokens": True}, "max_tokens", "max_tokens cannot be used: Input should be a number, not true or false"),
        ({"n": "2"}, "n", "n cannot be used: Input should be a valid integer"),
        ({"temperature": "1"}, "temperature", "temperature cannot be used: Input should be a valid number"),
        ({"logprobs": True}, "logprobs", "logprobs cannot be used: Input should be a valid integer"),
        (
            {"prompt": [97, True]},
            "prompt",
            "prompt cannot be used: Input should be a text, a list of token ids, or a list of texts or of such lists",
        ),
        ({"stop": ["a", 1]}, "stop", "stop cannot be used: Input should be a text or a list of texts"),
        ({"logit_bias": {"97": "1"}}, "logit_bias", "logit_bias.97 cannot be used: Input should be a valid number"),
        ({"logit_bias": {"97": True}}, "logit_bias", "logit_bias.97 cannot be used: Input should be a number, not"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "cannot be used: Input should be a valid integer"),
        ({"extra_body": {"stream": "yes"}}, "stream", "stream cannot be used: Input should be a valid boolean"),
        ({"extra_body": {"stop_token_ids": [True]}}, "stop_token_ids", "stop_token_ids.0 cannot be used"),
        (
            {"stream_options": {"include_usage": 1}},
            "stream_options",
            "stream_options.include_usage cannot be used: Input should be a valid boolean",
        ),
        (
            {"stream_options": {"include_usage": True}},
            "stream_options",
            "stream_options is set; it needs stream to be true",
        ),
    ],
)
def test_a_bad_request_names_the_field(client, fields, param, message):
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, **fields)
    assert caught.value.param == param
    assert message in str(caught.value)


def test_a_limit_of_tokens_is_named_as_the_client_names_it(client):
    with pytest.raises(openai.BadRequestError, match="max_completion_tokens is -1; it must be") as caught:
        chat(client, "b", max_completion_tokens=-1)
    assert caught.value.param == "max_completion_tokens"


def test_null_is_as_good_as_nothing(client):
    unset = ["stream", "stream_options", "n", "stop", "seed", "logprobs", "top_p", "logit_bias", "user", "metadata"]
    unset += ["attention_stats", "priority", "cache_salt", "guided", "return_token_ids", "include_stop_str_in_output"]
    fields = {"model": "chatting", "temperature": 0, **dict.fromkeys(unset)}
    text = {"prompt": "a", "max_tokens": 4, "echo": None, "best_of": None, "suffix": None}
    assert client.post("/completions", body={**fields, **text}, cast_to=dict)["choices"][0]["text"] == "bcde"
    unset = ("top_logprobs", "response_format", "tools", "tool_choice", "parallel_tool_calls", "max_tokens")
    unset += ("modalities", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
    words = {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 4, **dict.fromkeys(unset)}
    response = client.post("/chat/completions", body={**fields, **words}, cast_to=dict)
    assert response["choices"][0]["message"]["content"] == "bcde"


def test_a_whole_number_is_a_number(client):
    assert complete(client, temperature=0, top_p=1, logit_bias={"120": 100}).choices[0].text == "xxxx"


@pytest.mark.parametrize("schema", [{"type": "nonsense"}, {"description": "x" * 70_000}])
def test_a_form_that_cannot_be_names_response_format(client, schema):
    form = {"type": "json_schema", "json_schema": {"name": "bad", "schema": schema}}
    with pytest.raises(
        openai.BadRequestError, match=r"response_format (cannot be used|has 70019 characters)"
    ) as caught:
        chat(client, response_format=form)
    assert caught.value.param == "response_format"
    assert "guided" not in str(caught.value)


def test_a_body_that_is_too_large_is_413(start_server, chatting, server_settings):
    small = replace(server_settings.server, max_message_bytes=1000)
    with connect(start_server(chatting, server=small)) as client:
        assert complete(client).choices[0].text == "bcde"
        with pytest.raises(openai.APIStatusError, match="the body has more than 1000 bytes, the limit") as caught:
            complete(client, "x" * 1000)
    assert (caught.value.status_code, caught.value.type) == (413, "invalid_request_error")


def test_what_is_not_served_is_an_error_of_openai(client):
    with pytest.raises(openai.NotFoundError, match="there is no POST /v1/moderations here") as caught:
        client.moderations.create(input="a")
    assert caught.value.type == "invalid_request_error"
    with pytest.raises(openai.APIStatusError, match="there is no GET /v1/completions here") as caught:
        client.get("/completions", cast_to=object)
    assert (caught.value.status_code, caught.value.response.headers["allow"]) == (405, "POST")


def test_a_defect_of_ours_is_an_error_of_openai(client, monkeypatch):
    monkeypatch.setattr(ChatTemplate, "render", lambda *_, **__: 1 / 0)
    with pytest.raises(openai.InternalServerError, match="the server failed; its log says why") as caught:
        chat(client)
    assert caught.value.type == "server_error"


def test_a_model_without_a_template_completes_only(start_server, counting):
    with connect(start_server(counting)) as client:
        with pytest.raises(openai.BadRequestError, match="no chat template; use /v1/completions"):
            client.chat.completions.create(model="counting", messages=[{"role": "user", "content": "a"}])
        assert (
            client.completions.create(model="counting", prompt="a", temperature=0, max_tokens=2).choices[0].text == "bc"
        )


def test_what_stands_between_prompt_and_suffix(client, monkeypatch):
    monkeypatch.setattr(openai_request, "FILL_MARKS", (("<none>", "b", "c"), ("p", "s", "m")))
    response = complete(client, "ab", suffix="yz")
    assert (response.choices[0].text, response.usage.prompt_tokens) == ("nopq", len("p" + "ab" + "s" + "yz" + "m"))
    assert complete(client, suffix="").choices[0].text == "bcde"
    for fields in ({"prompt": [97]}, {"echo": True}):
        with pytest.raises(openai.BadRequestError, match="suffix needs one text as prompt, and echo to be false"):
            complete(client, suffix="z", **fields)


def test_a_full_queue_is_429_with_a_time_to_come_back(start_server, chatting, steps):
    client = connect(start_server(chatting, engine=EngineConfig(max_sequences=1, max_waiting_requests=1)))
    with client, complete(client, stream=True, max_tokens=100) as running:
        next(running)
        with complete(client, stream=True, max_tokens=100), pytest.raises(openai.RateLimitError) as caught:
            complete(client)
    assert int(caught.value.response.headers["retry-after"]) >= 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_frees_its_blocks(start_server, chatting, steps, stream):
    with connect(start_server(chatting)) as client:
        if stream:
            with complete(client, stream=True, max_tokens=120) as running:
                next(running)
        else:
            with pytest.raises(openai.APITimeoutError):
                complete(client, max_tokens=120, timeout=0.3)
        wait_for(lambda: idle(steps))
    assert len(steps) < 80  # of 120 steps, so the request did not run to its end


def test_templates(tmp_path):
    template = ChatTemplate("{% generation %}{{ messages[0] | tojson }}{% endgeneration %}", {})
    assert template.render([{"role": "user", "content": "<é>"}]) == '{"role": "user", "content": "<é>"}'
    template = ChatTemplate("{{ messages | tojson(ensure_ascii=False, separators=(',', ':'), sort_keys=True) }}", {})
    assert template.render([{"role": "b", "content": "é"}]) == '[{"content":"é","role":"b"}]'
    refusing = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(FieldError, match="messages do not fit the model's chat template: roles must alternate"):
        refusing.render([])
    with pytest.raises(FieldError, match="unsafe"):
        ChatTemplate("{{ ''.__class__.__mro__ }}", {}).render([])
    assert load_chat_template(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "x{{ bos_token }}", "bos_token": "B"}))
    assert load_chat_template(tmp_path).render([]) == "xB"
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(InputError, match=r"cannot be read: .*; correct or remove it"):
        load_chat_template(tmp_path)
