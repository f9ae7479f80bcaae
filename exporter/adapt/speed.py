"""The decode speed of the exported teacher and student: what `sharp-export` and `sharp bench latency` say of them."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sharp.plugins.errors import SharpError

CONTEXTS = (4096, 32768)
ANSWER_TOKENS = 32
PASSES = 3
SCRIPTS = Path(sys.executable).parent


def decode_speed(teacher: Path, student: Path, longest: int, advance: Callable[[], None]) -> dict[str, Any]:
    """Milliseconds a token of both, float32 on this machine's CPU, after every context up to `longest` tokens.

    Where an export or the measurement fails the entry `failed` says why: nobody should lose a model by it.
    """
    try:
        return _measure(teacher, student, longest, advance)
    except SharpError as error:
        return {"failed": str(error), "rows": []}


def _measure(teacher: Path, student: Path, longest: int, advance: Callable[[], None]) -> dict[str, Any]:
    contexts = [length for length in CONTEXTS if length < longest] or [longest - ANSWER_TOKENS - 1]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        room = max(contexts) + ANSWER_TOKENS + 1
        for source, norm, target in ((teacher, ("--norm", "softmax"), "teacher"), (student, (), "student")):
            _run("sharp-export", source, *norm, "--max-context", room, "-q", "-o", folder / target)
            advance()
        lengths = [option for length in contexts for option in ("--prompt-tokens", length)]
        figures = folder / "figures.json"
        options = ("--answer-tokens", ANSWER_TOKENS, "--passes", PASSES, "--output", figures)
        _run("sharp", "bench", "latency", folder / "teacher", folder / "student", *lengths, *options)
        advance()
        rows = json.loads(figures.read_text(encoding="utf-8"))["rows"]
    by_context = [
        {
            "context": length,
            **{
                Path(row["model"]).name: {"best_ms": row["best"], "median_ms": row["median"]}
                for row in rows
                if row["prompt_tokens"] == length
            },
            "times_as_fast": rows[2 * index + 1]["times_as_fast"],
        }
        for index, length in enumerate(contexts)
    ]
    return {"answer_tokens": ANSWER_TOKENS, "passes": PASSES, "rows": by_context}


def _run(program: str, *arguments: object) -> None:
    command = [str(SCRIPTS / program), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        said = (result.stderr.strip() or result.stdout.strip()).splitlines() or [f"exit code {result.returncode}"]
        raise SharpError(f"{program}: {said[-1].removeprefix('error: ')}")
