"""The steps of `sharp adapt`: read, measure, distil, measure again, then write the folder as a whole or not at all."""

import hashlib
import json
import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor, nn

from sharp.core.errors import InputError
from sharp.exporter.adapt.budget import WINDOWS_VERSION, Plan, Planner
from sharp.exporter.adapt.calibration import (
    CALIBRATION_VERSION,
    Calibration,
    calibrate,
    calibrated_lengths,
    check_calibrated,
    start_from,
)
from sharp.exporter.adapt.figures import token_losses, windows_of
from sharp.exporter.adapt.measurement import (
    Before,
    Measured,
    Phase,
    Texts,
    check_complete,
    measure_before,
    measure_student,
    read_before,
)
from sharp.exporter.adapt.output import check_output, write_model
from sharp.exporter.adapt.processes import Processes, join
from sharp.exporter.adapt.rates import EVALUATION_WINDOWS, SPEED_STEPS, evaluated_every, measure_rates
from sharp.exporter.adapt.recipe import Recipe, fastest_dtype
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
    on_plan: Callable[[Plan], None] = lambda _plan: None,
    began: float | None = None,
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
        on_plan: called with the plan of the run once its speed is measured, but not when a training is resumed.
        began: when the command began, from which the budget counts, on the clock `time.monotonic`; None: now.

    Returns:
        The report, the content of report.json; None if the run ended early, and in all processes of torchrun but the
        first.

    Raises:
        NotFoundError: the checkpoint or a text does not exist.
        InputError: the checkpoint, the text or a setting cannot be used; `folder` is not empty or not writable; its
            ".partial" folder holds a run with other settings or something else; the budget is too small; or memory is
            short.
        SharpError: the loss is no longer finite, or the result cannot be written.
    """
    began = time.monotonic() if began is None else began
    if not isinstance(path, Path | str):
        raise InputError(
            f"sharp.adapt takes the path of a Hugging Face folder or a .gguf file, not {type(path).__name__}; for a "
            "module of your own there is sharp.adapt_module, see sharp docs your-own-model"
        )
    path, folder = Path(path), Path(folder)
    check_adaptable(path)
    check_norm(settings.norm, settings.norm_options)
    normalizer = get_norm(settings.norm).normalizer
    if settings.calibrate == "auto":
        settings = replace(settings, calibrate="first" if normalizer == "entmax" else "no")
    if settings.calibrate != "no":
        check_calibrated(settings.norm, normalizer)
    work = folder.resolve().with_name(f"{folder.resolve().name}.partial")
    check_output(folder, work)
    processes, device = join(settings.device)
    if settings.batch % processes.count:
        raise InputError(f"--batch is {settings.batch}, but must be a multiple of the {processes.count} processes")
    with held(work) if processes.first else nullcontext():
        return _adapt(_Run(path, settings, folder, work, processes, device, phase, on_step, on_plan, stop_after, began))


@dataclass(frozen=True)
class _Run:
    """The arguments of `adapt`, with the folder `work` of the run's state, the processes, and this one's device."""

    path: Path
    settings: AdaptSettings
    folder: Path
    work: Path
    processes: Processes
    device: torch.device
    phase: Phase
    on_step: Callable[[Progress, float | None], None]
    on_plan: Callable[[Plan], None]
    stop_after: int | None
    began: float

    @property
    def spent(self) -> float:
        """The seconds since the command began."""
        return time.monotonic() - self.began


def _adapt(run: _Run) -> Measured | None:
    """Run `adapt` after its checks, with the lock of the folder `work` for the state of the run."""
    run.phase("Reading the checkpoint", 1)
    began = time.monotonic()
    student = _open_student(run.path, run.settings)
    reading = time.monotonic() - began
    _check_memory(student, run.device)
    run.phase("Reading the text", 1)
    text, unlike = training_text(run.settings, student), unlike_text(run.settings, student)
    nn.Module.to(student.model, run.device)
    try:
        found = _distil(run, student, text, unlike[1], reading)
    except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError when CPU memory is short
        said = memory_error(error, Recipe(1, run.settings.length, run.settings.batch))
        if said is error:
            raise
        raise said from error
    if found is None:
        return None
    report = _report(run, found, text, unlike[0])
    run.phase("Writing the model", 1)
    write_model(found.student, run.settings, run.path, run.folder.resolve(), report, run.phase)
    shutil.rmtree(run.work, ignore_errors=True)
    return report


@dataclass(frozen=True)
class _Distilled:
    """A trained student, with the seconds of its training and the figures from before and after it."""

    student: Student
    recipe: Recipe
    calibration: Calibration | None
    seconds: float
    before: Before
    after: Measured


def _distil(run: _Run, student: Student, text: TrainingText, unlike: Tensor, reading: float) -> _Distilled | None:
    """Plan, measure, calibrate and train the student, or continue the run whose state is saved; then measure again.

    `reading` is the time in seconds that reading the model took. Return None if the run ended early, and in all
    processes but the first.
    """
    settings, processes, config = run.settings, run.processes, student.decoder.config
    identity = _identity(student, settings, text, unlike, processes.count)
    state, before = state_of(run.work, identity), read_before(run.work, identity)
    texts: Texts = {"held_out": text.held_out, "unlike": unlike}
    if state is None:
        planner = _planner(run, student, text, texts, reading)
        plan = planner.plan(run.spent, before)
        run.on_plan(plan)
        before = before or Before(plan.measures)
    elif processes.first:
        before = check_complete(before, run.work)
    run.work.mkdir(parents=True, exist_ok=True)
    if processes.first:
        before = measure_before(run.work, identity, before, student, texts, run.phase)
    began, calibration = time.monotonic(), None
    if settings.calibrate != "no":
        longest = min(config.max_context, before.measures.calibrated)
        sequences = len(calibrated_lengths(len(text.train), longest))
        advance = run.phase("Calibrating the heads", config.layers * sequences)
        calibration = calibrate(student, text.train, settings.max_error, advance, longest)
        student = start_from(student, calibration)
    seconds = time.monotonic() - began
    if state is None:
        tokens = planner.tokens_after(plan, run.spent, before)
        recipe = planner.recipe(int(processes.of_first(tokens)))
    else:
        recipe = state.recipe
    if recipe.steps:
        _train(run, student, text, recipe, identity, 0 if state is None else state.step)
    if not processes.first or (run.stop_after is not None and run.stop_after < recipe.steps):
        return None
    final = read_state(run.work)
    seconds += 0.0 if final is None else final.seconds
    after = measure_student(student, before.measures, texts, run.phase, "Measuring the student")
    return _Distilled(student, recipe, calibration, seconds, before, after)


def _planner(run: _Run, student: Student, text: TrainingText, texts: Texts, reading: float) -> Planner:
    """Measure the speed of the run, and return what plans it. Writing is expected to take as long as reading did."""
    settings, processes = run.settings, run.processes
    fast = processes.of_first(fastest_dtype(next(student.model.parameters()).device) == "bfloat16")
    dtype = ("bfloat16" if fast else "float32") if settings.dtype == "auto" else settings.dtype
    trained = None if settings.calibrate == "only" else dtype
    advance = run.phase("Measuring the speed", SPEED_STEPS)
    batch = settings.batch // processes.count
    return Planner(
        settings,
        measure_rates(student, text.train, batch, settings.length, trained, advance),
        student.decoder.config.max_context,
        tuple(texts.values()),
        len(text.train),
        student.described.scheme.normalizer,
        dtype,
        processes.count,
        writing=reading,
    )


def _train(run: _Run, student: Student, text: TrainingText, recipe: Recipe, identity: str, done: int) -> None:
    """Train the student, with progress and evaluations; `done` steps of the recipe are done."""
    going_on = f", of which {done} are done" if done else ""
    advance = run.phase(
        f"Training {recipe.steps} steps of {recipe.length * recipe.batch} tokens{going_on}", recipe.steps
    )
    for _ in range(done):
        advance()
    windows = windows_of(text.held_out, recipe.length, EVALUATION_WINDOWS)
    every = evaluated_every(recipe.steps)

    def after(progress: Progress) -> None:
        """Report a training step, with the student's perplexity every `every` steps."""
        advance()
        measured = run.processes.first and (progress.step % every == 0 or progress.step == recipe.steps)
        run.on_step(progress, perplexity(token_losses(student, windows)) if measured else None)

    train(student, text.train, recipe, run.work, identity, after, run.stop_after, run.processes)


def _report(run: _Run, found: _Distilled, text: TrainingText, unlike: str) -> Measured:
    """Return the content of report.json; `unlike` is the name of the text unlike the training text."""
    settings = run.settings
    student, calibration = found.student, found.calibration
    return {
        "teacher": {
            "name": run.path.resolve().name,
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
        "calibration": None if calibration is None else calibration.record(),
        "device": str(run.device),
        "processes": run.processes.count,
        "versions": {name: version(name) for name in ("torch", "transformers", "peft", "sharp-attention")},
        "teacher_figures": found.before.teacher,
        "raw": found.before.raw,
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
    fields |= {"processes": processes, "windows": WINDOWS_VERSION, "calibration": CALIBRATION_VERSION}
    if student.described.scheme.normalizer == "adaptive_softmax":
        fields["temperature"] = student.described.temperature_coefficients
    return json.dumps(fields, sort_keys=True, default=str)
