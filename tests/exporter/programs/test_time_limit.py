"""A program that computes too long is ended with one sentence, even if its current operator does not return."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sharp.exporter.module import evaluated, trace
from sharp.exporter.programs import time_limit
from sharp.exporter.programs.time_limit import time_of_program
from tests.exporter.programs import gpt

STUCK = """
import signal, sys, time
from pathlib import Path
from sharp.exporter.programs import time_limit

time_limit.SECONDS = time_limit.GRACE = 0.1
with time_limit.time_of_program(Path(sys.argv[1])):
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})  # as in an operator, nothing interrupts it
    time.sleep(600)
"""


def test_a_long_export_is_refused_and_leaves_nothing(
    tmp_path: Path, sharp_export, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, path = gpt.GPT(), tmp_path / "tiny.pt2"
    with evaluated(module):
        torch.export.save(trace(module, (torch.zeros(1, 9, dtype=torch.int64),)), path)
    monkeypatch.setattr(time_limit, "SECONDS", 0.01)
    monkeypatch.setattr(time_limit, "AGAIN", 0.2)
    before = signal.getsignal(signal.SIGALRM)
    result = sharp_export(path, "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert "takes more than 0 minutes, the limit for a file of its size" in " ".join(result.output.split())
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.pt2"]
    assert signal.getsignal(signal.SIGALRM) == before


def test_an_operator_that_does_not_return_ends_the_process_with_the_same_sentence(tmp_path: Path) -> None:
    path = tmp_path / "tiny.pt2"
    path.touch()
    ended = subprocess.run([sys.executable, "-c", STUCK, path], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"Error: {path} takes more than 0 minutes")
    assert ended.stdout == ""


def test_other_files_are_not_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limit, "SECONDS", 0.001)
    (tmp_path / "model.pt").touch()
    before = signal.getsignal(signal.SIGALRM)
    with time_of_program(tmp_path / "model.pt"):
        assert signal.getsignal(signal.SIGALRM) == before
