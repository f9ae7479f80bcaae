"""`sharp run`: a chat in the terminal."""

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from sharp.serving.api.attention import AttentionSummary
from sharp.serving.api.errors import InputError
from sharp.serving.api.sampling_params import SamplingParams
from sharp.serving.run_cli import run
from sharp.serving.terminal_chat import changed, entropy_line

TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] }}:{{ message.content }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture
def chatting(hashing: Path, tmp_path: Path) -> Path:
    """Return a model folder whose next token is a hash of all tokens before it, with a chat template."""
    folder = tmp_path / "hashing"
    shutil.copytree(hashing, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def said(folder: Path, text: str, *options: str) -> tuple[list[str], str]:
    """Return the lines on stdout, and stderr."""
    result = CliRunner().invoke(run, [str(folder), "--temperature", "0", "--max-tokens", "4", *options], input=text)
    assert result.exit_code == 0, result.output
    return result.stdout.split("\n")[:-1], result.stderr


def test_every_response_is_of_the_whole_conversation(chatting: Path) -> None:
    from sharp import LLM

    llm, params = LLM(chatting), SamplingParams(temperature=0, max_tokens=4)
    first = llm.generate("u:one;a:", params)[0].text
    second = llm.generate(f"u:one;a:{first};u:two;a:", params)[0].text
    lines, errors = said(chatting, "one\n\ntwo\n")
    assert lines == [first, second]
    assert errors.count("attention entropy") == 2
    with_system, _ = said(chatting, "one\n", "--system", "be short")
    assert with_system == [llm.generate("s:be short;u:one;a:", params)[0].text]
    several, _ = said(chatting, '"""one\ntwo"""\n')
    assert several == [llm.generate("u:one\ntwo;a:", params)[0].text]


def test_a_model_without_a_template_continues_the_text(hashing: Path) -> None:
    from sharp import LLM

    expected = LLM(hashing).generate("one", SamplingParams(temperature=0, max_tokens=4))[0].text
    assert said(hashing, "one\n")[0] == [expected]


def test_commands(chatting: Path) -> None:
    first, second = said(chatting, "one\n/clear\none\n")[0]
    assert first == second
    first, again = said(chatting, "one\n/retry\n")[0]
    assert first == again
    lines, errors = said(
        chatting, "/set max-tokens 2\n/show\n/set top_k many\n/set colour 1\n/nothing\n/retry\n/exit\nmore\n"
    )
    assert "max_tokens 2" in lines[1] and "with norm softmax" in lines[0]
    for sentence in (
        "top_k is 'many'; it must be a number",
        "'colour' is no parameter of sampling",
        "there is no command /nothing; /help lists them",
        "there is no message to respond to again",
    ):
        assert sentence in errors
    assert "Ctrl-C stops a response" in "\n".join(said(chatting, "/help\n")[0])
    assert len(lines) == 2  # nothing comes after /exit


def test_a_conversation_that_is_too_long_is_one_sentence_and_goes_on(chatting: Path) -> None:
    lines, errors = said(chatting, f"{'x' * 5000}\none\n")
    assert len(lines) == 1 and "context" in errors


def test_numbers_of_sampling_are_checked() -> None:
    assert changed(SamplingParams(), "top-p 0.5").top_p == 0.5
    with pytest.raises(InputError, match="top_p is 2"):
        changed(SamplingParams(), "top_p 2")


@pytest.mark.parametrize(("mean", "colour"), [(0.2, "green"), (0.6, "yellow"), (0.9, "red")])
def test_the_colour_of_the_entropy(mean: float, colour: str) -> None:
    shares = np.full((2, 3), mean)
    shares[1, 2] += 0.05
    found = entropy_line(AttentionSummary(4, shares, shares, shares, shares, shares))
    assert found[1] == colour and "most dispersed 1.2" in found[0]


def test_ctrl_c_stops_the_response_and_not_the_program(chatting: Path) -> None:
    manifest = json.loads((chatting / "sharp.json").read_text())
    manifest["tokenizer"]["eos_token_ids"] = []  # a response that does not end by itself before the signal
    manifest |= {"max_context": 100_000, "trained_context": 100_000}
    (chatting / "sharp.json").write_text(json.dumps(manifest))
    ours, theirs = pty.openpty()
    program = [sys.executable, "-c", "from sharp.serving.run_cli import run; run()", str(chatting)]
    process = subprocess.Popen(
        [*program, "--temperature", "0", "--max-tokens", "90000"], stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)

    def until(text: str) -> str:
        """Return what the program shows up to `text`, and what was read with it."""
        shown = ""
        while text not in shown:
            shown += os.read(ours, 65536).decode(errors="replace")
        return shown

    try:
        until("> ")
        os.write(ours, b"one\n")
        if until("one\r\n").endswith("one\r\n"):
            os.read(ours, 1)  # the response has begun
        process.send_signal(signal.SIGINT)
        if "> " not in until("[stopped]").partition("[stopped]")[2]:
            until("> ")
        os.write(ours, b"/exit\n")
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
