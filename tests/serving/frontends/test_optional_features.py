"""Optional features that cannot start are off, with a sentence in the log, and the server serves all else."""

import json
import shutil
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import pytest
from tokenizers import Tokenizer, models

from sharp.serving.api.errors import InputError, UnavailableError
from sharp.serving.api_config import ApiConfig
from sharp.serving.text import chat_template
from sharp.v1 import control_pb2, control_pb2_grpc

MESSAGES = {"model": "counting", "messages": [{"role": "user", "content": "a"}]}
ROUTES = {"/v1/chat/completions": {}, "/v1/messages": {"max_tokens": 2}, "/tokenize": {}}


def changed(counting: Path, folder: Path) -> Path:
    return Path(shutil.copytree(counting, folder / "model"))


def post(server, route: str, **body) -> tuple[int, str]:
    """Return the status and the body of a response."""
    content, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://{server.http_address}{route}", content, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.parametrize("source", ["{% if %}", "{{ 'a' * 10**10 }}"])
def test_a_chat_template_that_cannot_be_used_is_off(start_server, counting, tmp_path, caplog, source):
    folder = changed(counting, tmp_path)
    (folder / "chat_template.jinja").write_text(source)
    server = start_server(folder)
    assert not server.chat
    assert f"chat is off: the chat template of {folder} cannot be read" in caplog.text
    for route, more in ROUTES.items():
        status, text = post(server, route, **MESSAGES, **more)
        assert status == 400, text
        assert f"chat is off: the chat template of {folder} cannot be read" in text
    status, text = post(server, "/v1/completions", model="counting", prompt="a", max_tokens=3, temperature=0)
    assert json.loads(text)["choices"][0]["text"] == "bcd"


def test_a_busy_machine_at_the_start_turns_chat_off(start_server, counting, tmp_path, monkeypatch):
    folder = changed(counting, tmp_path)
    (folder / "chat_template.jinja").write_text("{{ messages }}")

    def busy(*_: object) -> None:
        raise UnavailableError("no process can be started", 1.0)

    monkeypatch.setattr(chat_template, "TemplateProcess", busy)
    status, text = post(start_server(folder), "/v1/chat/completions", **MESSAGES)
    assert (status, "no process can be started" in text) == (400, True)


def test_a_template_that_the_user_chose_ends_the_start(start_server, counting, tmp_path):
    (tmp_path / "mine.jinja").write_text("{% if %}")
    with pytest.raises(InputError, match="correct or remove it"):
        start_server(counting, api=ApiConfig(chat_template=str(tmp_path / "mine.jinja")))


def test_guides_that_cannot_start_are_off(start_server, counting, tmp_path, caplog):
    folder = changed(counting, tmp_path)
    letters = {chr(0x100 + number): number for number in range(257)}
    Tokenizer(models.WordLevel(letters, unk_token=chr(0x100))).save(str(folder / "tokenizer.json"))
    server = start_server(folder)
    assert "guided generation is off: llguidance cannot use the tokenizer" in caplog.text
    status, text = post(server, "/v1/completions", model="counting", prompt=[97], max_tokens=3, guided_regex="a")
    assert (status, "llguidance cannot use the tokenizer of counting" in text) == (400, True)
    status, text = post(server, "/v1/completions", model="counting", prompt=[97], max_tokens=3, temperature=0)
    assert status == 200, text
    with grpc.insecure_channel(server.grpc_address) as channel:
        info = control_pb2_grpc.ControlServiceStub(channel).GetModelInfo(control_pb2.GetModelInfoRequest())
    assert (info.accepts.text, info.accepts.guided) == (True, False)
