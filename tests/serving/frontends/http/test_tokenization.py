"""vLLM's `/tokenize` and `/detokenize`."""

import json
import logging
import socket
import urllib.error
import urllib.request
from importlib.metadata import version

import pytest

from tests.serving.conftest import EOS, MAX_CONTEXT, write_folder

TEMPLATE = (
    "{% for message in messages %}{{ message.content }}<eos>{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def started(start_server, tmp_path_factory, ids_only):
    folder = write_folder(tmp_path_factory.mktemp("models") / "chatting", hashing=0)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return {"chatting": start_server(folder), "ids-only": start_server(ids_only)}


@pytest.fixture(scope="module")
def ask(started):
    def post(path, body=None, server="chatting"):
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(f"http://{started[server].http_address}{path}", data, timeout=20) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)["error"]["message"]

    return post


@pytest.mark.parametrize(
    ("question", "tokens"),
    [
        ({"prompt": "ab<eos>"}, [97, 98, EOS]),
        ({"prompt": "é", "model": "chatting", "add_special_tokens": False}, [195, 169]),
        ({"prompt": ""}, []),
        ({"messages": HI}, [104, 105, EOS, 97]),
        ({"messages": HI, "add_generation_prompt": False}, [104, 105, EOS]),
        ({"messages": None, "prompt": "a", "model": None}, [97]),
        (
            {"messages": HI, "media_io_kwargs": {}, "mm_processor_kwargs": {}},
            [104, 105, EOS, 97],
        ),
    ],
)
def test_tokenize(ask, question, tokens):
    found = {"count": len(tokens), "max_model_len": MAX_CONTEXT, "tokens": tokens, "token_strs": None}
    assert ask("/tokenize", question) == (200, found)


def test_names_and_back(ask):
    assert ask("/tokenize", {"prompt": " a<eos>", "return_token_strs": True})[1]["token_strs"] == ["Ġ", "a", "<eos>"]
    assert ask("/detokenize", {"tokens": [32, 97, 195, 169, EOS]}) == (200, {"prompt": " aé<eos>"})
    assert ask("/version") == (200, {"version": version("sharp-attention")})


@pytest.mark.parametrize(
    ("path", "body", "server", "status", "message"),
    [
        ("/tokenize", {}, "chatting", 400, "give either prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": HI}, "chatting", 400, "give either prompt or messages"),
        ("/tokenize", {"prompt": "a", "tools": []}, "chatting", 400, "tools is for messages, and there is a prompt"),
        ("/tokenize", {"prompt": "a" * (2**19 + 1)}, "chatting", 400, "has 524289 characters; the limit is 524288"),
        ("/detokenize", {"tokens": [1] * (2**16 + 1)}, "chatting", 400, "has 65537 entries; the limit is 65536"),
        ("/detokenize", {"tokens": [1] * 2**19}, "chatting", 413, "the body has more than 786444 bytes, the limit"),
        ("/tokenize", {"prompt": "a", "model": "b"}, "chatting", 404, "model 'b' is not served here; the server has"),
        ("/tokenize", {"messages": HI, "chat_template": "x"}, "chatting", 400, "chat_template is set"),
        ("/tokenize", {"promt": "a"}, "chatting", 400, "promt is not known here"),
        ("/tokenize", b'{"prompt": "\\ud800"}', "chatting", 400, "cannot be used: Invalid JSON"),
        ("/tokenize", {"prompt": "a"}, "ids-only", 400, "ids-only has no tokenizer"),
        ("/tokenize", {"messages": HI}, "ids-only", 400, "the model has no chat template"),
        ("/detokenize", {"tokens": [97, 257]}, "chatting", 400, "tokens has token id 257; chatting has ids 0 to 256"),
        ("/detokenize", {"tokens": [-1]}, "chatting", 400, "tokens has token id -1; chatting has ids 0 to 256"),
        ("/detokenize", {"tokens": [True]}, "chatting", 400, "tokens.0 cannot be used"),
        ("/detokenize", {"tokens": [1]}, "ids-only", 400, "tokens have no text, as ids-only has no tokenizer"),
        ("/detokenize", None, "chatting", 405, "there is no GET /detokenize here"),
    ],
)
def test_what_is_refused(ask, path, body, server, status, message):
    code, found = ask(path, body, server)
    assert code == status
    assert message in found


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/completions"])
def test_a_client_that_goes_in_the_middle_of_its_question_leaves_nothing_in_the_log(started, caplog, path):
    caplog.set_level(logging.INFO)
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n"
    host, port = started["chatting"].http_address.split(":")
    with socket.create_connection((host, int(port)), 10) as connection:
        connection.sendall(head.encode() + b'{"prompt":')
    with urllib.request.urlopen(f"http://{host}:{port}/version", timeout=10):
        pass  # by now the server has seen the end of the earlier connection
    assert [record.message for record in caplog.records] == []
