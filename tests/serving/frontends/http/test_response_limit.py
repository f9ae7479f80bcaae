"""A single response holds a bounded number of tokens, and of bytes for guides."""

import openai
import pytest

from sharp.serving.engine.guide_trial import GuideTrial, Outcome
from sharp.serving.frontends.http import response_limit
from tests.serving.conftest import write_folder
from tests.serving.frontends.http.test_logprobs import complete
from tests.serving.frontends.http.test_openai import TEMPLATE


@pytest.fixture(scope="module")
def client(start_server, tmp_path_factory):
    folder = write_folder(tmp_path_factory.mktemp("models") / "counting", hashing=0)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    address = start_server(folder).http_address
    with openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("field", ["echo", "return_token_ids"])
def test_prompts_that_many_completions_repeat_have_a_limit(client, field, monkeypatch):
    monkeypatch.setattr(response_limit, "MOST_REPEATED_TOKENS", 200)
    fields = {"max_tokens": 1, "extra_body": {field: True}}
    message = f"{field} is true, and 3 completions of a prompt repeat 240 tokens of prompts; the limit is 200"
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        client.completions.create(model="counting", prompt=[[97] * 60] * 2, n=3, **fields)
    assert caught.value.param == field
    assert len(client.completions.create(model="counting", prompt=[[97] * 50] * 2, n=3, **fields).choices) == 6


def test_guides_of_all_prompts_have_a_limit_that_no_waiting_lifts(client, monkeypatch):
    grammar = {"structured_outputs": {"grammar": 'start: "a" "b"'}}
    fields = {"model": "counting", "max_tokens": 4, "extra_body": grammar}
    size = 8 * 2**20
    monkeypatch.setattr(GuideTrial, "run", lambda *_: Outcome("", size))
    monkeypatch.setattr(response_limit, "GUIDE_BYTES", 3 * size)
    with pytest.raises(openai.BadRequestError, match="of 4 prompts takes 32 MB; the limit is 24 MB") as caught:
        client.completions.create(prompt=["a"] * 4, **fields)
    assert caught.value.param == "structured_outputs"
    assert {choice.text for choice in client.completions.create(prompt=["a"] * 3, **fields).choices} == {"ab"}


def test_a_whole_response_has_a_limit_of_tokens(client, monkeypatch):
    monkeypatch.setattr(response_limit, "MOST_WHOLE_TOKENS", 60)
    with pytest.raises(openai.BadRequestError, match="max_tokens lets the completions have 66 tokens") as caught:
        client.completions.create(model="counting", prompt=["a", "b"], n=3, max_tokens=11)
    assert caught.value.param == "max_tokens"
    message = {"role": "user", "content": "a"}
    response = client.chat.completions.create(model="counting", messages=[message], n=3, temperature=0)
    assert response.usage.completion_tokens == 60  # each of the three completions has its share of the limit
    (text, _), *_ = complete(client, ["a", "b"], n=3, max_tokens=11, stream=True)
    assert len(text) == 11
