"""A chat template is a program that comes with the model. Its memory and time are bounded, at start and in requests."""

import errno
import json
import os
import resource
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import Mock

import pytest
from click.testing import CliRunner

from sharp.serving.api.errors import FieldError, InputError, QueueFullError, UnavailableError
from sharp.serving.cli import serve
from sharp.serving.text import template_process
from sharp.serving.text.chat_template import ChatTemplate, load_chat_template

HOSTILE = {
    "a text of 10 GB": "{{ 'a' * 10**10 }}",
    "a number without end": "{{ 7**(10**9) }}",
    "nested ranges": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a text that doubles": "{% set t = namespace(a='a') %}{% for i in range(60) %}{% set t.a = t.a * 2 %}{% endfor %}",
    "a text of 100 MB": "{% for i in range(1000) %}{{ 'a' * 10**5 }}{% endfor %}",
    "deep nesting": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "more than a template": "a" * (2**20 + 1),
}


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(template_process, "SECONDS", 0.5)


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_a_template_that_takes_too_much_ends_the_start_with_a_sentence(counting: Path, tmp_path: Path, source: str):
    """A template that takes too much ends the start with one sentence.

    Once `{{ 'a' * 10**10 }}` took 7 GB of the server, and nested ranges took a processor forever.
    """
    folder = tmp_path / "model"
    folder.mkdir()
    for file in counting.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").write_text(source)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InputError, match=r"chat template of .* cannot be read: .*; correct or remove it") as caught:
        load_chat_template(folder)
    assert "\n" not in str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # in KB


def test_the_server_does_not_start_with_such_a_template(tmp_path: Path):
    (tmp_path / "chat_template.jinja").write_text(HOSTILE["a text of 10 GB"])
    result = CliRunner().invoke(serve, [str(tmp_path), "--grpc-port", "0", "--http-port", "0"])
    assert (result.exit_code, result.output.count("Error: ")) == (2, 1)
    assert "it takes more than 160 MB; correct or remove it" in result.output


def test_a_conversation_on_which_a_template_takes_too_much_is_refused_and_the_next_is_not():
    template = ChatTemplate("{% if messages | length > 1 %}{{ 'a' * 10**10 }}{% else %}b{% endif %}", {})
    message = {"role": "user", "content": "a"}
    for _ in range(2):
        with pytest.raises(FieldError, match="do not fit the model's chat template: it takes more than 160 MB"):
            template.render([message, message])
        assert template.render([message]) == "b"


def test_a_process_that_is_lost_is_started_again():
    template = ChatTemplate(
        "{% if messages | length > 1 %}{{ 7**(messages | length * 10**9) }}{% else %}b{% endif %}", {}
    )
    message = {"role": "user", "content": "a"}
    with pytest.raises(FieldError, match=r"do not fit the model's chat template: it takes more than 0\.5 s"):
        template.render([message, message])
    assert template.render([message]) == "b"


def test_a_process_that_is_killed_is_no_fault_of_the_conversation():
    """A killed process is not the conversation's fault.

    Once the response was 400: it "takes more than 2 s, or 160 MB".
    """
    template = ChatTemplate("{{ messages[0].content }}", {})
    for _ in range(3):  # also in the moment between a check of the process and its end
        os.kill(template._process._process.pid, signal.SIGKILL)
        assert template.render([{"role": "user", "content": "a"}]) == "a"


def test_a_process_that_is_stopped_is_given_up(monkeypatch: pytest.MonkeyPatch):
    """A stopped process is given up after a while.

    Once a conversation of more than 64 kB waited forever, and all requests behind it.
    """
    template = ChatTemplate("{{ messages[0].content }}", {})
    for size in (1, 100_000):
        with monkeypatch.context() as patch:
            patch.setattr(template_process, "WALL_SECONDS", -0.8)  # the template waits one second longer than this
            os.kill(template._process._process.pid, signal.SIGSTOP)
            with pytest.raises(QueueFullError, match="the machine is too busy to render it within"):
                template.render([{"role": "user", "content": "a" * size}])
        assert template.render([{"role": "user", "content": "a" * size}]) == "a" * size


def test_more_than_1024_open_files_do_not_matter():
    """Templates render in a process that has more than 1024 open files.

    Once every conversation "took more than 2 s" after the process was started again.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2000:
        pytest.skip("this process may not open that many files")
    template = ChatTemplate("b", {})
    with ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1100):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        template.close()
        assert template.render([]) == "b"
        template.close()


def test_a_process_that_cannot_be_started_is_another_servers_business(monkeypatch: pytest.MonkeyPatch):
    """If no process can be started, the client is told to try another server.

    Once the response was "the server failed; its log says why", and the log had a traceback.
    """
    template = ChatTemplate("b", {})
    template.close()
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
        with pytest.raises(UnavailableError, match="no process can be started: Too many open files; try again in 1 s"):
            template.render([])
    assert template.render([]) == "b"


def test_messages_that_are_nested_too_deeply_are_refused():
    nested: list = []
    for _ in range(100_000):
        nested = [nested]
    template = ChatTemplate("{{ messages }}{{ extra }}", {})
    with pytest.raises(FieldError, match="nested too deeply"):
        template.render([], variables={"extra": nested})


def test_settings_that_are_nested_too_deeply_are_refused(tmp_path: Path):
    """Settings that are nested too deeply are refused. Once they caused a traceback of RecursionError."""
    (tmp_path / "tokenizer_config.json").write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(InputError, match=r"cannot be read: .*; correct or remove it"):
        load_chat_template(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": 7}))
    with pytest.raises(InputError, match="it is no text"):
        load_chat_template(tmp_path)
