"""The figures of teacher, raw swap and student that the report compares."""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from sharp.core.errors import InputError
from sharp.exporter.adapt.figures import along_context, head_figures, retrieval, token_losses
from sharp.exporter.adapt.measures import MEASURED, Measures
from sharp.exporter.adapt.student import Student
from sharp.exporter.verification.perplexity import perplexity

MEASURED_FILE = "before.json"  # figures of teacher and raw swap, beside the state of a run
Measured = dict[str, Any]
# phase(name, steps) announces the next phase and returns a function to call after each of the phase's steps.
Phase = Callable[[str, int], Callable[[], None]]
Texts = dict[str, Tensor]  # token ids int64 [n]: held_out, of the training text, and unlike, of another


@dataclass(frozen=True)
class Before:
    """The figures from before the training, as far as they are measured: None is not measured yet."""

    measures: Measures
    teacher: Measured | None = None
    raw: Measured | None = None

    @property
    def complete(self) -> bool:
        """Whether nothing is left to measure before the training."""
        return self.teacher is not None and self.raw is not None

    @property
    def seconds(self) -> float:
        """The time that the figures took."""
        return sum(figures["seconds"] for figures in (self.teacher, self.raw) if figures is not None)


def read_before(work: Path, identity: str) -> Before | None:
    """Read the figures of the run with this `identity` from the folder `work`; None if they are missing or damaged."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        content = json.loads((work / MEASURED_FILE).read_bytes())
        if content["run"] == identity:
            return Before(Measures(**content["measures"]), content["teacher"], content["raw"])
    return None


def check_complete(before: Before | None, work: Path) -> Before:
    """Return the figures that a run must have whose training has begun.

    Raises:
        InputError: figures are missing. They cannot be measured again, because their extent is not known any more.
    """
    if before is None or not before.complete:
        raise InputError(f"{work / MEASURED_FILE} is damaged; remove the folder {work} to start again")
    return before


def measure_before(work: Path, identity: str, before: Before, student: Student, texts: Texts, phase: Phase) -> Before:
    """Measure what `before` lacks: the teacher, then the raw swap, which is the untrained `student`.

    The figures of each are saved in the folder `work` at once, with the `identity` of the run, for `read_before`.
    """
    if before.teacher is None:
        with student.teacher():
            figures = measure_student(student, before.measures, texts, phase, "Measuring the teacher")
        before = replace(before, teacher=figures)
        _save(work, identity, before)
    if before.raw is None:
        name = "Measuring the raw swap"
        before = replace(before, raw=measure_student(student, before.measures, texts, phase, name, needles=False))
        _save(work, identity, before)
    return before


def _save(work: Path, identity: str, before: Before) -> None:
    """Write the figures before the training to a file in `work`, with the identity of the run, in one piece."""
    written = work / f"{MEASURED_FILE}.partial"
    written.write_text(json.dumps({"run": identity, **asdict(before)}), encoding="utf-8")
    written.replace(work / MEASURED_FILE)


def measure_student(
    student: Student, measures: Measures, texts: Texts, phase: Phase, name: str, *, needles: bool = True
) -> Measured:
    """Return the figures of the student (of the teacher inside `student.teacher()`), as they stand in the report.

    `name` is the name of the `phase`. `needles`: measure retrieval, too. `unlike` is the name of the text unlike the
    training text, and its token ids.
    """
    found: Measured = {"seconds": 0.0}
    context = student.decoder.config.max_context
    advance = phase(name, measures.steps(texts.values(), context, needles=needles))
    began = time.monotonic()
    for key, tokens in texts.items():
        short = token_losses(student, measures.windows_of(tokens)[0], advance)
        found[key] = {"perplexity": perplexity(short), "length": short.shape[1] + 1, "tokens": short.numel()}
        found[key]["by_position"] = along_context(
            student, tokens, MEASURED * measures.length, measures.longest, advance
        )
    heads = head_figures(student, texts["unlike"])
    found["heads"] = {"entropy": heads.entropy, "support": heads.support}
    found["mean_entropy"], found["mean_support"] = heads.mean_entropy, heads.mean_support
    advance()
    if needles:
        rows = retrieval(student, measures.needle_lengths(context), advance, measures.trials)
        found["retrieval"] = rows
        found["retrieved"] = sum(row["right"] for row in rows) / sum(row["trials"] for row in rows) if rows else None
    found["seconds"] = round(time.monotonic() - began, 1)
    return found
