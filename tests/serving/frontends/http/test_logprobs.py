"""Logprobs in OpenAI's responses have texts, bytes and offsets of tokens, and, as in vLLM, token ids."""

import openai
import pytest
from tokenizers import Tokenizer as FileTokenizer
from tokenizers import decoders, models

from sharp.serving.api.events import TokenLogprobs
from sharp.serving.frontends.http.logprobs import TextLogprobs
from sharp.serving.frontends.http.token_texts import TokenTexts
from sharp.serving.text.tokenizer import Tokenizer
from tests.serving.conftest import EOS, byte_tokenizer, idle, wait_for, write_folder
from tests.serving.frontends.http.test_openai import TEMPLATE

STREAMS = pytest.mark.parametrize("stream", [False, True])
ASKED = {"return_token_ids": True}
PART = "\ufffd"  # the text of a token that is not a whole character


@pytest.fixture(scope="module")
def client(start_server, tmp_path_factory):
    folder = write_folder(tmp_path_factory.mktemp("models") / "counting", hashing=0)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    address = start_server(folder).http_address
    with openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0) as client:
        yield client


def complete(client, prompt, *, regex=None, stream=False, **fields):
    """Return the text and logprobs of every choice, joined from the parts of a stream."""
    body = {"guided": {"regex": regex}} if regex else {}
    fields = {"temperature": 0, "max_tokens": 8, "logprobs": 1, **fields}
    response = client.completions.create(model="counting", prompt=prompt, stream=stream, extra_body=body, **fields)
    choices = {}
    for part in response if stream else [response]:
        for choice in part.choices:
            text, logprobs = choices.setdefault(choice.index, ("", {}))
            for name, values in (choice.logprobs or openai.types.completion_choice.Logprobs()).model_dump().items():
                logprobs.setdefault(name, []).extend(values or ())
            choices[choice.index] = (text + choice.text, logprobs)
    return [choices[index] for index in range(len(choices))]


@pytest.mark.parametrize("stream", [False, True])
def test_where_tokens_begin(client, stream):
    ((text, logprobs),) = complete(client, "a", regex="xé€y", stream=stream)
    assert text == "xé€y"
    assert logprobs["tokens"] == ["x", *(f"bytes:\\x{byte:x}" for byte in "é€".encode()), "y"]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 2, 2, 3]
    for text, logprobs in complete(client, ["aé"], regex="x€", stream=stream, echo=True, n=2):
        assert text == "aéx€"
        assert logprobs["text_offset"] == [0, 1, 1, 2, 3, 3, 3]
    ((text, logprobs),) = complete(client, [97, 256, 98], stream=stream, echo=True, max_tokens=1)
    assert (text, logprobs["tokens"]) == ("abc", ["a", "<eos>", "b", "c"])
    assert logprobs["text_offset"] == [0, 1, 1, 2]  # the special token has no text


def test_the_token_that_came_is_among_the_most_likely(client):
    ((_, logprobs),) = complete(client, "a", regex="x", logprobs=1)
    (top,) = logprobs["top_logprobs"]
    assert set(top) == {"b", "x"}
    assert top["x"] == logprobs["token_logprobs"][0] < top["b"]
    ((_, logprobs),) = complete(client, "a", logprobs=0, max_tokens=1)
    assert list(logprobs["top_logprobs"][0]) == ["b"]


def test_tokens_that_are_no_characters_are_told_apart_by_their_bytes(client):
    fields = {"logit_bias": {"196": 100}, "max_tokens": 1}
    ((_, logprobs),) = complete(client, [194], **fields)  # 195 was likely
    assert logprobs["tokens"] == [r"bytes:\xc4"]
    (top,) = logprobs["top_logprobs"]
    assert top[r"bytes:\xc3"] > top[r"bytes:\xc4"] + 3
    assert top[r"bytes:\xc4"] == logprobs["token_logprobs"][0]


def test_of_tokens_with_one_text_the_likeliest_counts(tmp_path):
    logprobs = TextLogprobs(texts_of(tmp_path, sentence_piece(["<unk>", "<0x41>", "A"])))
    entry = TokenLogprobs(1, -3.0, ((2, -0.5), (1, -3.0)))
    assert logprobs.of([entry])["top_logprobs"] == [{"A": -0.5}]


@pytest.mark.parametrize("stream", [False, True])
def test_the_bytes_of_split_characters(client, stream):
    response = client.chat.completions.create(
        model="counting",
        messages=[{"role": "user", "content": "a"}],
        temperature=0,
        logprobs=True,
        top_logprobs=1,
        stream=stream,
        extra_body={"guided": {"regex": "€x"}},
    )
    parts = [part.choices[0].logprobs for part in (response if stream else [response]) if part.choices]
    entries = [entry for part in parts if part for entry in part.content]
    assert bytes(byte for entry in entries for byte in entry.bytes).decode() == "€x"
    assert entries[1].top_logprobs[0].bytes == [0xE3]  # the first byte that the counting model expects


def test_echoed_logprobs_have_a_limit_for_all_prompts_and_completions(client):
    fields = {"logprobs": 20, "max_tokens": 0, "echo": True}
    message = "logprobs is 20, which with echo makes 275520 numbers for 13120 tokens of all prompts and completions"
    for prompt, n in (([97] * 100, 128), ([[97] * 82] * 2, 80)):
        with pytest.raises(openai.BadRequestError) as caught:
            complete(client, prompt, n=n, **fields)
        assert caught.value.param == "logprobs"
    assert f"{message}; the limit is 262144" in str(caught.value)


def test_many_echoed_logprobs_are_one_json(client):
    choices = complete(client, [[97] * 64] * 3, n=2, echo=True, logprobs=20, max_tokens=2)
    assert [text for text, _ in choices] == ["a" * 64 + "bc"] * 6
    assert all(logprobs == choices[0][1] for _, logprobs in choices)
    assert [len(values) for values in choices[0][1].values()] == [66] * 4


def test_logprobs_of_completions_that_are_not_streamed_have_a_limit(client, steps):
    fields = {"logprobs": 20, "max_tokens": 100}
    message = (
        "logprobs is 20, which makes 268800 numbers for 12800 tokens of all prompts and completions; "
        "the limit is 262144"
    )
    for prompt, n in ((["a"], 128), (["a", "b"], 64)):
        with pytest.raises(openai.BadRequestError, match=f"{message}; set a lower max_tokens") as caught:
            complete(client, prompt, n=n, **fields)
        assert caught.value.param == "logprobs"
    words = {"model": "counting", "messages": [{"role": "user", "content": "a"}], "logprobs": True}
    with pytest.raises(openai.BadRequestError, match=r"top_logprobs is 20, which makes .* the limit") as caught:
        client.chat.completions.create(**words, n=128, top_logprobs=20, max_tokens=100)
    assert caught.value.param == "top_logprobs"
    wait_for(lambda: idle(steps))
    assert len(steps) < 50  # the first of the two prompts was aborted, too
    with client.completions.create(model="counting", prompt="a", temperature=0, n=128, stream=True, **fields) as stream:
        assert next(stream).choices[0].logprobs.tokens == ["b"]


def test_a_completion_without_max_tokens_ends_where_its_logprobs_have_their_limit(client, monkeypatch):
    monkeypatch.setattr("sharp.serving.frontends.http.response_limit.MAX_PROMPT_LOGPROBS", 100)
    words = {"model": "counting", "messages": [{"role": "user", "content": "a"}], "temperature": 0}
    response = client.chat.completions.create(
        **words, n=2, logprobs=True, top_logprobs=4, extra_body={"ignore_eos": True}
    )
    assert [(len(choice.logprobs.content), choice.finish_reason) for choice in response.choices] == [(10, "length")] * 2


def texts_of(tmp_path, tokenizer):
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return TokenTexts(Tokenizer(tmp_path / "tokenizer.json"))


def sentence_piece(vocabulary, *, unigram=False):
    """Return a tokenizer like SentencePiece's, which writes unknown characters as bytes."""
    if unigram:
        model = models.Unigram([(token, -1.0) for token in vocabulary], unk_id=0, byte_fallback=True)
    else:
        pairs = {token: number for number, token in enumerate(vocabulary)}
        model = models.BPE(pairs, [], unk_token="<unk>", byte_fallback=True)
    tokenizer = FileTokenizer(model)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def test_texts_of_tokenizers(tmp_path):
    texts = texts_of(tmp_path, byte_tokenizer())
    assert [texts.of(byte).utf8 for byte in range(256)] == [[byte] for byte in range(256)]
    assert (texts.of(256).text, texts.of(256).utf8, texts.of(256).characters) == ("<eos>", list(b"<eos>"), 0)

    vocabulary = ["<unk>", "<0xE2>", "<0x41>", "\u2581a", "\ufffd", "\u2581"]
    for tokenizer in (sentence_piece(vocabulary), sentence_piece(vocabulary, unigram=True)):
        texts = texts_of(tmp_path, tokenizer)
        assert [texts.of(token).name for token in range(1, 6)] == [r"bytes:\xe2", "A", " a", PART, " "]
        read = [
            (texts.of(token).text, bytes(texts.of(token).utf8), texts.of(token).characters) for token in range(1, 6)
        ]
        assert read == [
            (PART, b"\xe2", 1),
            ("A", b"A", 1),
            (" a", b" a", 2),
            (PART, PART.encode(), 1),  # the token is the character U+FFFD itself
            (" ", b" ", 1),
        ]

    tokenizer = FileTokenizer(models.WordLevel({"\ufffd": 0, "a": 1}, unk_token="a"))
    tokenizer.decoder = decoders.WordPiece()
    texts = texts_of(tmp_path, tokenizer)
    assert (texts.of(0).utf8, texts.of(1).utf8) == (None, list(b" a"))
    assert (texts.of(0).name, texts.of(1).name) == ("token_id:0", " a")
    assert (TokenTexts(None).of(7).text, TokenTexts(None).of(7).utf8) == ("token_id:7", None)


def ask(client, prompt, *, model="counting", **fields):
    return client.completions.create(model=model, prompt=prompt, temperature=0, **{"max_tokens": 3, **fields})


def chat(client, **fields):
    messages = [{"role": "user", "content": "a"}]
    fields = {"temperature": 0, "max_completion_tokens": 3, **fields}
    return client.chat.completions.create(model="counting", messages=messages, **fields)


def token_ids(response, *, stream):
    """Return the token ids of every choice, joined from its chunks."""
    found = {}
    for part in response if stream else [response]:
        for choice in part.choices:
            found.setdefault(choice.index, []).extend(choice.model_extra["token_ids"])
    return [found[index] for index in range(len(found))]


@STREAMS
def test_the_completions_endpoint_gives_those_of_prompt_and_completion(client, stream):
    response = ask(client, [[97], [107, 108]], n=2, stream=stream, extra_body=ASKED)
    parts = list(response) if stream else [response]
    assert token_ids(parts if stream else response, stream=stream) == [[98, 99, 100]] * 2 + [[109, 110, 111]] * 2
    prompts = {}
    for part in parts:
        for choice in part.choices:
            if "prompt_token_ids" in choice.model_extra:
                assert choice.index not in prompts  # only the first chunk has prompt_token_ids
                prompts[choice.index] = choice.model_extra["prompt_token_ids"]
    assert [prompts[index] for index in range(4)] == [[97], [97], [107, 108], [107, 108]]


@STREAMS
def test_an_echo_is_no_part_of_the_completions_tokens(client, stream):
    fields = {"echo": True, "logprobs": 0, "stream": stream, "extra_body": ASKED}
    assert token_ids(ask(client, "ab", **fields), stream=stream) == [[99, 100, 101]]


@STREAMS
def test_a_chat_has_those_of_the_prompt_once(client, stream):
    response = chat(client, n=2, stream=stream, extra_body=ASKED)
    parts = list(response) if stream else [response]
    assert token_ids(parts if stream else response, stream=stream) == [[98, 99, 100]] * 2
    assert parts[0].model_extra["prompt_token_ids"] == list(b"uaa")  # the prompt that the template makes
    assert sum("prompt_token_ids" in part.model_extra for part in parts) == (2 if stream else 1)


@STREAMS
def test_tokens_without_text_are_there(client, stream):
    held = ask(client, "a", stop="bcx", stream=stream, extra_body=ASKED)
    assert token_ids(held, stream=stream) == [[98, 99, 100]]
    ended = ask(client, [254], stream=stream, extra_body=ASKED)
    assert token_ids(ended, stream=stream) == [[255, EOS]]


def test_what_is_not_requested_is_not_there(client):
    for response in (ask(client, "a"), chat(client)):
        assert not {"token_ids", "prompt_token_ids"} & set(response.choices[0].model_extra)
        assert not response.model_extra


@STREAMS
def test_a_model_without_a_tokenizer_gives_them_always(start_server, ids_only, stream):
    address = start_server(ids_only).http_address
    with openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0) as client:
        response = ask(client, [97], model="ids-only", stream=stream)
        parts = list(response) if stream else [response]
    assert token_ids(parts if stream else response, stream=stream) == [[98, 99, 100]]
    assert {choice.text for part in parts for choice in part.choices} == {""}
    assert not any("prompt_token_ids" in choice.model_extra for part in parts for choice in part.choices)
