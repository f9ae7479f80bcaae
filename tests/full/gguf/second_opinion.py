"""llama.cpp as `make foreign` builds it: the library, its converter and the vocabularies of llama.cpp's own tests."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[3] / "build" / "llama_cpp"
BUILT = (FOLDER / "installed").is_file()


def run(files: Sequence[Path], **job: Any) -> list[dict[str, Any]]:
    """Run a job for each GGUF file in a process with llama.cpp, and return the results.

    `llama_cpp_process.py` says which jobs there are.
    """
    jobs = [{"file": str(path), **job} for path in files]
    result = subprocess.run(
        [sys.executable, Path(__file__).with_name("llama_cpp_process.py")],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(FOLDER)},
    )
    assert result.returncode == 0, result.stderr[:1000]
    answers: list[dict[str, Any]] = json.loads(result.stdout)
    for path, answer in zip(files, answers, strict=True):
        assert "error" not in answer, f"{path}: {answer}"
    return answers
