"""The decode speed of teacher and student, exported by `sharp-export` and measured by `sharp bench latency`."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sharp.core.errors import SharpError

CONTEXTS = (4096, 32768)
COMPLETION_TOKENS = 32
PASSES = 3
SCRIPTS = Path(sys.executable).parent


def decode_speed(teacher: Path, student: Path, longest: int, advance: Callable[[], None]) -> dict[str, Any]:
    """Measure milliseconds per token of both checkpoints, float32 on the CPU, after 4,096 and 32,768 tokens.

    Contexts that do not fit into `longest` tokens are left out; if none fits, one that does is measured. `advance` is
    called three times.

    Returns:
        The entries completion_tokens, passes, and rows (see `latencies`). If an export or the measurement fails, the
        entry failed says why and rows is empty. No `SharpError` is raised, which would lose the model.
    """
    try:
        return _measure(teacher, student, longest, advance)
    except SharpError as error:
        return {"failed": str(error), "rows": []}


def _measure(teacher: Path, student: Path, longest: int, advance: Callable[[], None]) -> dict[str, Any]:
    """Export teacher and student, and return decoding times at all `CONTEXTS` (tokens) that `longest` has room for.

    `advance` is called after each step of the work. The result has `completion_tokens`, `passes` and `rows`, one row
    per context.
    """
    fitting = [length for length in CONTEXTS if room(length) <= longest]
    contexts = fitting or [max(1, longest - room(0))]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        export_both(teacher, student, room(max(contexts)), folder, advance)
        rows = latencies(folder, contexts, PASSES)
        advance()
    return {"completion_tokens": COMPLETION_TOKENS, "passes": PASSES, "rows": rows}


def room(context: int) -> int:
    """Return the tokens of context that a model needs for a measurement after `context` tokens."""
    return context + COMPLETION_TOKENS + 1


def export_both(
    teacher: Path,
    student: Path,
    context: int,
    folder: Path,
    advance: Callable[[], None],
    options: Sequence[str] = (),
) -> None:
    """Export both models to `teacher` and `student` in `folder`, with more `options` of `sharp-export`.

    The teacher is exported with softmax, both with a largest context of `context` tokens. `advance` is called after
    each export.

    Raises:
        SharpError: a model cannot be exported; the message is that of `sharp-export`.
    """
    for source, norm, target in ((teacher, ("--norm", "softmax"), "teacher"), (student, (), "student")):
        _run("sharp-export", source, *norm, *options, "--max-context", context, "-q", "-o", folder / target)
        advance()


def latencies(folder: Path, contexts: Sequence[int], passes: int) -> list[dict[str, Any]]:
    """Return the best and median milliseconds per token of the models of `export_both`, after every context.

    A row has the entries context (tokens), best_ms and median_ms (each with teacher and student) and times_as_fast, the
    student against the teacher. `folder` is that of `export_both`.

    Raises:
        SharpError: the models cannot be measured; the message is that of `sharp bench latency`.
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
    """Run an installed program of Sharp. SharpError with its last line of output if it fails."""
    command = [str(SCRIPTS / program), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        said = (result.stderr.strip() or result.stdout.strip()).splitlines() or [f"exit code {result.returncode}"]
        raise SharpError(f"{program}: {said[-1].removeprefix('error: ')}")
