"""Mistakes whose sentence needs real commands: two exports into one folder, Ctrl-C, a checkpoint for a server."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

CHECKPOINT = Path(__file__).parents[2] / "models" / "checkpoints" / "text-ssa.safetensors"
SHARP = (sys.executable, "-c", "from sharp.core.cli import main; main(prog_name='sharp')")
SECONDS = 500


def started(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start `sharp` with its working directory in `folder`."""
    return subprocess.Popen(
        [*SHARP, *arguments], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8"
    )


def wait_for_staging(folder: Path) -> None:
    """Wait until an export has made its hidden folder."""
    deadline = time.monotonic() + SECONDS
    while not any(folder.glob(".out.partial-*")):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_second_export_into_a_folder_stops_at_its_start(tmp_path):
    """Both ran to their ends, and the second one failed after minutes, as the folder was no longer empty."""
    export = ("export", str(CHECKPOINT), "-o", "out")
    first = started(tmp_path, *export)
    wait_for_staging(tmp_path)
    first.send_signal(signal.SIGSTOP)  # otherwise it may end before the second one starts
    second = started(tmp_path, *export)
    _, said = second.communicate(timeout=SECONDS)
    first.send_signal(signal.SIGCONT)
    assert second.returncode == 2
    assert f"Error: another command is writing {tmp_path / 'out'} now; wait until it ends, or choose another" in said
    assert "Reading the checkpoint" not in said
    _, said = first.communicate(timeout=SECONDS)
    assert first.returncode == 0, said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_ctrl_c_says_that_an_export_wrote_nothing(tmp_path):
    export = started(tmp_path, "export", str(CHECKPOINT), "-o", "new/out")
    wait_for_staging(tmp_path / "new")
    export.send_signal(signal.SIGINT)
    _, said = export.communicate(timeout=SECONDS)
    assert export.returncode == 130
    assert said.endswith("Interrupted: no model folder was written\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["serve", "run", "generate"])
def test_a_file_that_is_no_checkpoint_is_refused_by_the_export_on_first_use(tmp_path, command):
    (tmp_path / "notes.txt").write_text("hello")
    arguments = (command, "notes.txt", *(("a",) if command == "generate" else ()))
    result = subprocess.run(
        [*SHARP, *arguments],
        cwd=tmp_path,
        env={**os.environ, "SHARP_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("Error: notes.txt is not a checkpoint that Sharp can read; give a Hugging Face")
    assert result.stderr.count("\n") == 1
