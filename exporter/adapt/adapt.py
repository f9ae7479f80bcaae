"""The steps of `sharp adapt`: read, measure, distil, measure again, then write the folder as a whole or not at all."""

import hashlib
import json
import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor, nn

from sharp.core.errors import InputError
from sharp.exporter.adapt.budget import WINDOWS_VERSION, choose_recipe, measured_length
from sharp.exporter.adapt.calibration import Calibration, calibrate, check_calibrated, start_from
from sharp.exporter.adapt.figures import (
    token_losses,
    windows_of,
)
from sharp.exporter.adapt.measurement import Measured, Phase, measure_before, measure_student
from sharp.exporter.adapt.output import check_output, write_model
from sharp.exporter.adapt.processes import Processes, join
from sharp.exporter.adapt.recipe import Recipe
from sharp.exporter.adapt.settings import AdaptSettings
from sharp.exporter.adapt.state import read_state, state_of
from sharp.exporter.adapt.student import Student, check_norm, make_student
from sharp.exporter.adapt.text import TrainingText, training_text, unlike_text
from sharp.exporter.adapt.training import Progress, memory_error, train
from sharp.exporter.checkpoints.path_checks import check_adaptable
from sharp.exporter.staging import held
from sharp.exporter.verification.perplexity import perplexity
from sharp.models.norms import get_norm
from sharp.models.tasks.scoring import memory_of

EVALUATIONS = 10  # evaluations on the held-out text during training


def no_phase(_name: str, _steps: int) -> Callable[[], None]:
    """Return a function that does nothing. This is the `Phase` of a caller that shows no progress."""
    return lambda: None


def adapt(
    path: Path | str,
    settings: AdaptSettings,
    folder: Path | str,
    phase: Phase = no_phase,
    on_step: Callable[[Progress, float | None], None] = lambda _progress, _perplexity: None,
    stop_after: int | None = None,
) -> Measured | None:
    """Adapt the checkpoint at `path` to another norm and write it to `folder`, which must be empty or not exist.

    A run that was killed continues from its last saved state, which is in the folder named `folder` with ".partial"
    appended.

    Args:
        path: a Hugging Face folder or a .gguf file of a causal language model with softmax attention.
        settings: the norm, the text and the training.
        folder: receives the adapted model, its tokenizer and the report.
        phase: called as phase(name, steps) when a phase of the work begins; returns a function that is called after
            each of the phase's steps.
        on_step: called after every training step with the `Progress` and the perplexity on the held-out text, which is
            None except about ten times in a run, and always in other processes than the first.
        stop_after: ends the run after this step, as if it had been killed.

    Returns:
        The report, the content of report.json; None if the run ended early, and in all processes of torchrun but the
        first.

    Raises:
        NotFoundError: the checkpoint or a text does not exist.
        InputError: the checkpoint, the text or a setting cannot be used; `folder` is not empty or not writable; its
            ".partial" folder holds a run with other settings or something else; or memory is short.
        SharpError: the loss is no longer finite, or the result cannot be written.
    """
    if not isinstance(path, Path | str):
        raise InputError(
            f"sharp.adapt takes the path of a Hugging Face folder or a .gguf file, not {type(path).__name__}; for a "
            "module of your own there is sharp.adapt_module, see docs/your-own-model.md"
        )
    path, folder = Path(path), Path(folder)
    check_adaptable(path)
    check_norm(settings.norm, settings.norm_options)
    if settings.calibrate != "no":
        check_calibrated(settings.norm, get_norm(settings.norm).normalizer)
    work = folder.resolve().with_name(f"{folder.resolve().name}.partial")
    check_output(folder, work)
    processes, device = join(settings.device)
    if settings.batch % processes.count:
        raise InputError(f"--batch is {settings.batch}, but must be a multiple of the {processes.count} processes")
    with held(work) if processes.first else nullcontext():
        return _adapt(path, settings, folder, work, processes, device, phase, on_step, stop_after)


def _adapt(
    path: Path,
    settings: AdaptSettings,
    folder: Path,
    work: Path,
    processes: Processes,
    device: torch.device,
    phase: Phase,
    on_step: Callable[[Progress, float | None], None],
    stop_after: int | None,
) -> Measured | None:
    """Run `adapt` after its checks, with the lock of the folder `work` for the state of the run."""
    phase("Reading the checkpoint", 1)
    student = _open_student(path, settings)
    _check_memory(student, device)
    phase("Reading the text", 1)
    text, unlike = training_text(settings, student), unlike_text(settings, student)
    nn.Module.to(student.model, device)
    try:
        found = _distil(student, settings, text, unlike, work, processes, phase, on_step, stop_after)
    except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError when CPU memory is short
        said = memory_error(error, Recipe(1, settings.length, settings.batch))
        if said is error:
            raise
        raise said from error
    if found is None:
        return None
    report = _report(path, settings, found, text, unlike[0], str(device), processes.count)
    phase("Writing the model", 1)
    write_model(found.student, settings, path, folder.resolve(), report, phase)
    shutil.rmtree(work, ignore_errors=True)
    return report


@dataclass(frozen=True)
class _Distilled:
    """A trained student, with the seconds of its training and the figures from before and after it."""

    student: Student
    recipe: Recipe
    calibration: Calibration | None
    seconds: float
    before: Measured
    after: Measured


def _distil(
    student: Student,
    settings: AdaptSettings,
    text: TrainingText,
    unlike: tuple[str, Tensor],
    work: Path,
    processes: Processes,
    phase: Phase,
    on_step: Callable[[Progress, float | None], None],
    stop_after: int | None,
) -> _Distilled | None:
    """Measure, calibrate and train the student, or continue the run whose state is in `work`; then measure again.

    Return None if the run ended early, and in all processes but the first.
    """
    config = student.decoder.config
    identity = _identity(student, settings, text, unlike[1], processes.count)
    state = state_of(work, identity)
    recipe = state.recipe if state is not None else choose_recipe(settings, student, text, processes)
    work.mkdir(parents=True, exist_ok=True)
    longest = settings.measure_length or measured_length(
        recipe, config.max_context, (len(text.held_out), len(unlike[1]))
    )
    measure = partial(measure_student, student, settings.length, min(config.max_context, longest), text, unlike)
    of_run = f"{identity} {longest}"
    before = measure_before(work, of_run, student, measure, phase, state is None) if processes.first else {}
    began, calibration = time.monotonic(), None
    if settings.calibrate != "no":
        advance = phase("Calibrating the heads", config.layers)
        calibration = calibrate(student, text.train, settings.max_error, advance)
        student = start_from(student, calibration)
    seconds = time.monotonic() - began
    if recipe.steps:
        done = 0 if state is None else state.step
        going_on = f", of which {done} are done" if done else ""
        advance = phase(
            f"Training {recipe.steps} steps of {settings.length * settings.batch} tokens{going_on}", recipe.steps
        )
        for _ in range(done):
            advance()
        windows = windows_of(text.held_out, settings.length, 4)
        every = max(1, recipe.steps // EVALUATIONS)

        def after(progress: Progress) -> None:
            """Report a training step, with the student's perplexity every `every` steps."""
            advance()
            measured = processes.first and (progress.step % every == 0 or progress.step == recipe.steps)
            on_step(progress, perplexity(token_losses(student, windows)) if measured else None)

        train(student, text.train, recipe, work, identity, after, stop_after, processes)
    if not processes.first or (stop_after is not None and stop_after < recipe.steps):
        return None
    final = read_state(work)
    seconds += 0.0 if final is None else final.seconds
    return _Distilled(student, recipe, calibration, seconds, before, measure(phase("Measuring the student", 16)))


def _report(
    path: Path, settings: AdaptSettings, found: _Distilled, text: TrainingText, unlike: str, device: str, processes: int
) -> Measured:
    """Return the content of report.json; `unlike` is the name of the text unlike the training text."""
    student, calibration = found.student, found.calibration
    return {
        "teacher": {
            "name": path.resolve().name,
            "architecture": type(student.model).__name__,
            "sha256": student.opened.sha256,
        },
        "norm": settings.norm,
        "alpha": student.described.alpha if student.described.scheme.normalizer == "entmax" else None,
        "recipe": asdict(found.recipe) | {"tokens": found.recipe.tokens, "rank": settings.rank},
        "text": text.name,
        "text_sha256": _digest(text.train),
        "unlike": unlike,
        "seconds": round(found.seconds, 1),
        "calibration": None if calibration is None else asdict(calibration) | {"kept_share": calibration.kept_share},
        "device": device,
        "processes": processes,
        "versions": {name: version(name) for name in ("torch", "transformers", "peft", "sharp-attention")},
        **found.before,
        "student": found.after,
    }


def _open_student(path: Path, settings: AdaptSettings) -> Student:
    """Read the checkpoint at `path` and make the student from it."""
    layers = None if settings.layers is None else range(settings.layers[0], settings.layers[1] + 1)
    return make_student(
        path,
        settings.norm,
        settings.norm_options,
        settings.rank,
        layers,
        settings.length,
        settings.seed,
        settings.ignore_keys,
    )


def _check_memory(student: Student, device: torch.device) -> None:
    """Check that the device's memory holds 1.5 times the float32 weights, the estimated need of training.

    Raises:
        InputError: it does not; the message gives both sizes.
    """
    weights = sum(parameter.numel() for parameter in student.model.parameters())
    needed, there = 4 * weights * 3 // 2, memory_of(device)
    if needed > there:
        raise InputError(
            f"the model's {weights:,} weights need {needed / 2**30:,.0f} GiB of memory in training, there are "
            f"{there / 2**30:.0f}; choose a smaller model, or a machine with more"
        )


def _digest(tokens: Tensor) -> str:
    """Return the SHA-256 of the token ids as hexadecimal digits."""
    return hashlib.sha256(tokens.numpy().tobytes()).hexdigest()


def _identity(student: Student, settings: AdaptSettings, text: TrainingText, unlike: Tensor, processes: int) -> str:
    """Return all that two runs must share for one to continue the other, as JSON."""
    fields = asdict(settings)
    for name in ("text", "held_out", "keep_adapter", "measure_speed", "device"):
        fields.pop(name)
    fields |= {"teacher": student.opened.sha256, "text": _digest(text.train), "unlike": _digest(unlike)}
    fields |= {"processes": processes, "windows": WINDOWS_VERSION}
    if student.described.scheme.normalizer == "adaptive_softmax":
        fields["temperature"] = student.described.temperature_coefficients
    return json.dumps(fields, sort_keys=True, default=str)
