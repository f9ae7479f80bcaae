"""`sharp run` of a checkpoint exports it once, and chats as the exported folder does."""

import os
import subprocess
from pathlib import Path

from tests.full.end_to_end.commands import CHECKPOINT, SCRIPTS, run

TEXT = "To install a package, the administrator"


def chat(cache: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPTS / "sharp", "run", CHECKPOINT, "--temperature", "0", "--max-tokens", "24"],
        input=f"{TEXT}\n",
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env={**os.environ, "SHARP_CACHE": str(cache)},
    )


def test_a_checkpoint_is_exported_on_its_first_use(tmp_path: Path) -> None:
    first, second = chat(tmp_path), chat(tmp_path)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert "Reading the checkpoint" in first.stderr and "Reading the checkpoint" not in second.stderr
    (folder,) = tmp_path.glob("models/*/text-ssa")
    generated = run("sharp", "generate", folder, TEXT, "--temperature", 0, "--max-tokens", 24)
    assert first.stdout == second.stdout == generated.stdout
    assert "attention entropy" in second.stderr
