"""`sharp compare FOLDER --with URL` against fake servers of other programs, and against our own server."""

import json
import time

import pytest
from click.testing import CliRunner

from sharp.core import http_connection
from sharp.serving.compare.cli import compare
from tests.serving.compare.foreign_servers import (
    EOS,
    LlamaCppPython,
    LlamaServer,
    Model,
    Refusal,
    TextGenerationInference,
    Vllm,
    serving,
)

SERVERS = (Vllm, LlamaServer, TextGenerationInference, LlamaCppPython)
WITH_PROMPT = (Vllm, LlamaServer, TextGenerationInference)


def run(folder, url, *options):
    arguments = [str(folder), "--with", url, "--device", "cpu", *map(str, options)]
    result = CliRunner().invoke(compare, arguments, prog_name="sharp compare")
    assert not result.exception or isinstance(result.exception, SystemExit), result.exception
    return result


def compared(folder, url, *options):
    result = run(folder, url, "--json", *options)
    assert result.exit_code in (0, 1), result.output
    found = json.loads(result.stdout)
    assert (result.exit_code, found["verdict"].partition(":")[0]) in ((0, "agrees"), (1, "differs"))
    return found


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("def f(x):\n    return x<eos> 12")
    return path


@pytest.mark.parametrize("server", SERVERS)
def test_servers_of_the_same_model_agree(hashing, server):
    with serving(server(Model())) as url:
        found = compared(hashing, url, "--tokens", 60, "--new-tokens", 4)
    assert found["agrees"], found["verdict"]
    assert all(text["same_tokens"] for text in found["texts"])
    assert found["generated"] > 0
    assert (found["stop_tokens"] is None) == (server is TextGenerationInference)
    if server in WITH_PROMPT:
        assert found["logprobs"]["compared"] > 300
        assert found["logprobs"]["largest_difference"] < 1e-5
        assert found["logprobs"]["kl_divergence"] < 1e-6
    else:
        assert found["logprobs"]["compared"] == found["generated"]
        assert any(line.startswith("log-probabilities of the prompt of 'prose'") for line in found["not_compared"])


def test_our_own_server_agrees_and_a_server_of_another_model_differs(hashing, counting, start_server, text):
    found = compared(hashing, f"http://{start_server(hashing).http_address}/v1", "--text", text)
    assert found["agrees"], found["verdict"]
    assert found["logprobs"]["compared"] == found["texts"][0]["tokens"] - 1 + 16
    assert found["stop_tokens"] == {"folder": [EOS], "with": None, "missing": [], "extra": []}
    found = compared(hashing, f"http://{start_server(counting).http_address}", "--text", text)
    assert "another model" in found["verdict"]


@pytest.mark.parametrize("server", [Vllm, LlamaServer])
@pytest.mark.parametrize(("position", "cause"), [(1, "another model"), (9, "RoPE's base or scaling")])
def test_the_first_position_that_differs(hashing, text, server, position, cause):
    with serving(server(Model(from_position=position))) as url:
        found = compared(hashing, url, "--text", text)
    first = found["texts"][0]["first_beyond_tolerance"]
    assert cause in found["verdict"]
    assert first["position"] == position
    assert abs(first["here"] - first["there"]) > 1


def test_a_small_difference_everywhere_is_one_of_precision(hashing, text):
    with serving(Vllm(Model(scale=1.03))) as url:
        assert compared(hashing, url, "--text", text, "--tolerance", 0.2)["agrees"]
        found = compared(hashing, url, "--text", text, "--tolerance", 0.02)
    assert "a little everywhere" in found["verdict"]


@pytest.mark.parametrize("server", SERVERS)
def test_another_tokenizer_is_named_with_text_position_and_both_tokens(hashing, text, server):
    with serving(server(Model(prefix=(7,)))) as url:
        found = compared(hashing, url, "--text", text)
    assert f"the tokens of {str(text)!r} at position 0: 100 here, 7 there: another tokenizer" in found["verdict"]
    assert found["texts"][0]["first_other_token"] == {"position": 0, "here": 100, "there": 7}
    # If the server takes ids as the prompt, log-probabilities are comparable all the same.
    assert (found["logprobs"]["compared"] > 0) == (server in (Vllm, LlamaServer))


@pytest.mark.parametrize("server", [Vllm, LlamaServer])
def test_a_stop_token_at_which_the_server_goes_on(hashing, text, server):
    with serving(server(Model(eos=()))) as url:
        found = compared(hashing, url, "--text", text)
    assert f"{EOS} ends a completion here and not there" in found["verdict"]
    assert found["stop_tokens"]["extra"] == [EOS]


def test_the_table_and_the_verdict(hashing, text):
    with serving(Vllm(Model())) as url:
        result = run(hashing, url, "--text", text)
    lines = result.stdout.splitlines()
    assert lines[-1].startswith("agrees: the same 26 tokens of 1 text, 41 log-probabilities within "), lines
    assert f"{hashing} beside {url} (hashing)" in lines
    assert result.stderr == ""


class Replies:
    """A server with one reply to every request."""

    def __init__(self, reply, seconds=0.0):
        self.reply, self.seconds = reply, seconds

    def respond(self, path, body):
        time.sleep(self.seconds)
        if isinstance(self.reply, Exception):
            raise self.reply
        return self.reply(path) if callable(self.reply) else self.reply


def completions(choice):
    return lambda path: {"data": []} if path == "/v1/models" else {"choices": [choice], "tokens": [1]}


REDIRECT = Refusal(302)
REDIRECT.headers = {"Location": "http://127.0.0.1:9/elsewhere"}
NAN = {"tokens": ["token_id:1"], "token_logprobs": [float("nan")], "top_logprobs": None}


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (b"<html>Welcome</html>", "sends no JSON, but '<html>Welcome</html>'; is it the address of a model's server?"),
        (b"\xff" * 10, "sends no JSON"),
        (b"[" * 100_000, "sends no JSON"),
        ([], "/v1/models sends what no known server sends"),
        ({"data": 7}, "sends what no known server sends (data: Input should be a valid list)"),
        (completions({}), "gives neither log-probabilities nor completions"),
        (completions({"logprobs": NAN}), "a log-probability must be at most 0"),
        (completions({"logprobs": {"tokens": ["a"], "token_logprobs": []}}), "as many tokens as log-probabilities"),
        (Refusal(401, {"error": "Unauthorized"}), "give the server's token with --token"),
        (Refusal(500, "no"), "gives neither log-probabilities nor completions"),
        (REDIRECT, "gives neither log-probabilities nor completions"),
    ],
)
def test_what_is_no_server_of_a_model_is_one_sentence(hashing, text, reply, message):
    with serving(Replies(reply)) as url:
        result = run(hashing, url, "--text", text)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.output
    assert message in result.stderr


def test_a_server_that_is_slow_or_away_is_one_sentence(hashing, text, monkeypatch):
    with serving(Replies({}, seconds=3)) as url:
        result = run(hashing, url, "--text", text, "--timeout", 0.2)
    assert (result.exit_code, result.stderr) == (
        2,
        f"Error: {url}/v1/models took more than 0.2 s; allow more with --timeout\n",
    )
    result = run(hashing, url, "--text", text)
    assert (result.exit_code, f"{url} does not respond" in result.stderr) == (2, True)
    monkeypatch.setattr(http_connection, "MOST_BYTES", 1000)
    with serving(Replies(b" " * 2000)) as url:
        result = run(hashing, url, "--text", text)
    assert (result.exit_code, "ask for fewer tokens" in result.stderr) == (2, True)


def test_a_busy_server_is_asked_again(hashing, text):
    class Busy(Vllm):
        refusals = 0

        def respond(self, path, body):
            if self.refusals < 2:
                self.refusals += 1
                refusal = Refusal(503, {"error": {"message": "Loading model"}})
                refusal.headers = {"Retry-After": "0"}
                raise refusal
            return super().respond(path, body)

    with serving(Busy(Model())) as url:
        assert compared(hashing, url, "--text", text)["agrees"]


def test_the_token_is_sent(hashing, text, monkeypatch):
    sent = []
    monkeypatch.setattr(
        http_connection.urllib.request.OpenerDirector,
        "open",
        lambda self, request, timeout: sent.append(request.get_header("Authorization")) or 1 / 0,
    )
    with pytest.raises(ZeroDivisionError):
        CliRunner().invoke(
            compare, [str(hashing), "--with", "http://127.0.0.1:1", "--token", "secret"], catch_exceptions=False
        )
    assert sent == ["Bearer secret"]
