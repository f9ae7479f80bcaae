"""The figures of teacher, raw swap and student that the report compares."""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from sharp.core.errors import InputError
from sharp.exporter.adapt.budget import MEASURED
from sharp.exporter.adapt.figures import (
    along_context,
    head_figures,
    needle_lengths,
    retrieval,
    token_losses,
    windows_of,
)
from sharp.exporter.adapt.student import Student
from sharp.exporter.adapt.text import TrainingText
from sharp.exporter.verification.perplexity import perplexity

MEASURED_FILE = "before.json"  # figures of teacher and raw swap, beside the state of a run
Measured = dict[str, Any]
# phase(name, steps) announces the next phase and returns a function to call after each of the phase's steps.
Phase = Callable[[str, int], Callable[[], None]]


def measure_before(
    work: Path, of_run: str, student: Student, measure: Callable[..., Measured], phase: Phase, at_start: bool
) -> Measured:
    """Return the entries teacher_figures and raw of the report: figures of the teacher, and of the untrained student.

    The figures are measured by `measure` (`measure_student` for a given student) and kept in a file in the folder
    `work`, because a resumed run has no untrained student any more. `of_run` identifies the run; its figures are read
    from the file if it has them. Otherwise they are measured (again) if `at_start`, that is, no step is done yet.

    Raises:
        InputError: the file is damaged or of another run, and steps are done already.
    """
    kept = work / MEASURED_FILE
    if kept.is_file():
        with suppress(ValueError, KeyError, TypeError):
            content = json.loads(kept.read_bytes())
            if content["run"] == of_run:
                measured: Measured = content["measured"]
                return measured
        if not at_start:
            raise InputError(f"{kept} is damaged; remove the folder {work} to start again")
    advance = phase("Measuring the teacher", 32)
    with student.teacher():
        teacher = measure(advance)
    raw = measure(advance, needles=False)
    written = work / f"{MEASURED_FILE}.partial"
    found: Measured = {"teacher_figures": teacher, "raw": raw}
    written.write_text(json.dumps({"run": of_run, "measured": found}), encoding="utf-8")
    written.replace(kept)
    return found


def measure_student(
    student: Student,
    length: int,
    longest: int,
    text: TrainingText,
    unlike: tuple[str, Tensor],
    advance: Callable[[], None],
    *,
    needles: bool = True,
) -> Measured:
    """Return the figures of the student (of the teacher inside `student.teacher()`), as they stand in the report.

    Perplexities are in windows of `length` tokens, and by position up to `longest`. `advance` is called once, and with
    `needles` (measure retrieval, too) once more for every length and depth of `retrieval`. `unlike` is the name of the
    text unlike the training text, and its token ids.
    """
    found: Measured = {"seconds": 0.0}
    began = time.monotonic()
    for name, tokens in (("held_out", text.held_out), ("unlike", unlike[1])):
        short = token_losses(student, windows_of(tokens, length))
        found[name] = {"perplexity": perplexity(short), "length": short.shape[1] + 1, "tokens": short.numel()}
        found[name]["by_position"] = along_context(student, tokens, MEASURED * length, longest)
    heads = head_figures(student, unlike[1])
    found["heads"] = {"entropy": heads.entropy, "support": heads.support}
    found["mean_entropy"], found["mean_support"] = heads.mean_entropy, heads.mean_support
    advance()
    if needles:
        rows = retrieval(student, needle_lengths(student.decoder.config.max_context, length), advance)
        found["retrieval"] = rows
        found["retrieved"] = sum(row["right"] for row in rows) / sum(row["trials"] for row in rows) if rows else None
    found["seconds"] = round(time.monotonic() - began, 1)
    return found
