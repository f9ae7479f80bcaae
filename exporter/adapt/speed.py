"""The decode speed of the exported teacher and student: what `sharp-export` and `sharp bench latency` say of them."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sharp.plugins.errors import SharpError

CONTEXTS = (4096, 32768)
COMPLETION_TOKENS = 32
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
    fitting = [length for length in CONTEXTS if room(length) <= longest]
    contexts = fitting or [max(1, longest - room(0))]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        export_both(teacher, student, room(max(contexts)), folder, advance)
        rows = latencies(folder, contexts, PASSES)
        advance()
    return {"completion_tokens": COMPLETION_TOKENS, "passes": PASSES, "rows": rows}


def room(context: int) -> int:
    """Tokens of context that measuring after `context` tokens takes."""
    return context + COMPLETION_TOKENS + 1


def export_both(
    teacher: Path,
    student: Path,
    context: int,
    folder: Path,
    advance: Callable[[], None],
    options: Sequence[str] = (),
) -> None:
    """The model folders `teacher` and `student` in `folder`; `options` are more of `sharp-export`'s.

    Raises:
        SharpError: one cannot be exported; the message is what `sharp-export` says.
    """
    for source, norm, target in ((teacher, ("--norm", "softmax"), "teacher"), (student, (), "student")):
        _run("sharp-export", source, *norm, *options, "--max-context", context, "-q", "-o", folder / target)
        advance()


def latencies(folder: Path, contexts: Sequence[int], passes: int) -> list[dict[str, Any]]:
    """Best and median milliseconds a token of the models of `export_both`, after every context.

    Raises:
        SharpError: they cannot be measured; the message is what `sharp bench latency` says.
    """
    lengths = [option for length in contexts for option in ("--prompt-tokens", length)]
    figures = folder / "figures.json"
    options = ("--completion-tokens", COMPLETION_TOKENS, "--passes", passes, "--output", figures)
    _run("sharp", "bench", "latency", folder / "teacher", folder / "student", *lengths, *options)
    found = json.loads(figures.read_text(encoding="utf-8"))["rows"]
    return [
        {
            "context": teacher["prompt_tokens"],
            "best_ms": {"teacher": teacher["best"], "student": student["best"]},
            "median_ms": {"teacher": teacher["median"], "student": student["median"]},
            "times_as_fast": student["times_as_fast"],
        }
        for teacher, student in zip(found[::2], found[1::2], strict=True)
    ]


def _run(program: str, *arguments: object) -> None:
    command = [str(SCRIPTS / program), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        said = (result.stderr.strip() or result.stdout.strip()).splitlines() or [f"exit code {result.returncode}"]
        raise SharpError(f"{program}: {said[-1].removeprefix('error: ')}")
