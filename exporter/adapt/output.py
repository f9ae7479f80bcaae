"""The folder of the adapted model, which appears as a whole or not at all, and its neighbour with the run's state."""

import os
from pathlib import Path

import torch
from torch import nn

from sharp.core.errors import InputError, SharpError
from sharp.exporter.adapt.measurement import MEASURED_FILE, Measured, Phase
from sharp.exporter.adapt.report import write_report
from sharp.exporter.adapt.settings import AdaptSettings
from sharp.exporter.adapt.speed import decode_speed
from sharp.exporter.adapt.state import STATE_FILE
from sharp.exporter.adapt.student import Student, finish
from sharp.exporter.staging import Staging, remove_stale
from sharp.models.adapted_model import attention_norms

WORK_FILES = {name + end for name in (STATE_FILE, MEASURED_FILE) for end in ("", ".partial")}


def check_output(folder: Path, work: Path) -> None:
    """Check before the run that the model can be written to `folder` and the state of the run to `work`.

    Raises:
        InputError: `folder` is a file or not empty, `work` holds something other than a run's state, or the folder that
            they are in is not writable.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file, where a folder is to be written; choose another with -o")
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"the output folder {folder} is not empty; choose another with -o, or remove it first")
    if work.exists() and (not work.is_dir() or {file.name for file in work.iterdir()} - WORK_FILES):
        raise InputError(f"{work}, where the state of the run is to be kept, is something else; choose another -o")
    parent = next(ancestor for ancestor in work.parents if ancestor.exists())
    if not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"nothing can be written to {parent}; choose another folder with -o")


def write_model(
    student: Student, settings: AdaptSettings, teacher: Path, target: Path, report: Measured, phase: Phase
) -> None:
    """Write the finished model, its tokenizer and the report into the folder `target`, or nothing after an error.

    `report` gets the entries scaled_queries and head_parameters, and speed if the settings ask for a measurement of the
    decode speed of the checkpoint `teacher` and of the student.

    Raises:
        SharpError: the folder cannot be written, for example because the disk is full.
    """
    staging: Staging | None = None
    try:
        remove_stale(target)
        staging = Staging(target)
        written = staging.path
        described = finish(student, written / "adapter" if settings.keep_adapter else None)
        report["scaled_queries"] = described.scaled_queries
        report["head_parameters"] = _head_parameters(student)
        nn.Module.to(student.model, "cpu")
        student.model.save_pretrained(written)
        assert student.opened.tokenizer is not None
        student.opened.tokenizer.save_pretrained(written)
        if settings.measure_speed:
            learned = student.opened.architecture.positions == "learned"
            longest = student.decoder.config.max_context if learned else 2**20
            report["speed"] = decode_speed(teacher, written, longest, phase("Measuring the decode speed", 3))
        write_report(report, written)
        staging.publish()
    except Exception as error:  # a full disk raises OSError or SafetensorError
        if isinstance(error, OSError) or "No space" in str(error) or type(error).__name__ == "SafetensorError":
            raise SharpError(
                f"the model cannot be written to {target.parent}: {error}; make room and run the same command again"
            ) from error
        raise
    finally:
        if staging is not None:
            staging.remove()


def _head_parameters(student: Student) -> dict[str, float]:
    """Return the medians over all heads of the normalizer's learned parameters, by name; empty if it learns none."""
    found = [norm.head_params() for norm in attention_norms(student.model)]
    rows = [parameters.detach().cpu() for parameters in found if parameters is not None]
    if not rows:
        return {}
    names = student.described.scheme.head_parameters
    return {name: round(median.item(), 3) for name, median in zip(names, torch.cat(rows).median(0).values, strict=True)}
