"""Commands that are given damaged files end with a sentence, and the fuzzer of commands finds those that do not."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.full.fuzz import commands

ROOT = Path(__file__).parents[3]


def test_damaged_files_end_commands_with_a_sentence():
    chosen = ("--kind", "safetensors", "--kind", "gguf", "--runs", "4")
    command = [sys.executable, "-m", "tests.full.fuzz.commands", *chosen]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert (ended.returncode, ended.stdout.count("0 findings")) == (0, 2), ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("end", "code", "problem"),
    [
        (lambda: None, 0, None),
        (lambda: (_ for _ in ()).throw(SystemExit(2)), 2, None),
        (lambda: [][0], 70, "a traceback: IndexError"),
        (lambda: os._exit(9), 9, "exit code 9"),
        (lambda: time.sleep(60), -9, "more than 0.5 s"),
        (lambda: len(b"1" * 300_000_000), 0, "GB of memory"),
    ],
)
def test_a_command_that_ends_badly_is_a_finding(monkeypatch, tmp_path, end, code, problem):
    monkeypatch.setattr(commands, "sharp", lambda _arguments, prog_name: end())
    monkeypatch.setattr(commands, "SECONDS", 0.5 if code == -9 else 60)
    if problem == "GB of memory":
        monkeypatch.setattr(commands, "MOST_BYTES", 250_000_000)
    found = commands.run([], tmp_path / "log")
    assert found[0] == code
    assert found[1] is None if problem is None else problem in found[1]


def test_a_sample_that_is_refused_whole_is_an_error(monkeypatch):
    monkeypatch.setattr(commands, "sharp", lambda _arguments, prog_name: (_ for _ in ()).throw(SystemExit(2)))
    result = CliRunner().invoke(commands.main, ["--kind", "safetensors", "--runs", "1"])
    assert result.exit_code == 1
    assert "the sample of safetensors is refused" in result.output
