"""`sharp adapt`, step by step: read, measure, distil, measure again, then show the folder whole or not at all."""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from sharp.exporter.adapt.figures import (
    along_context,
    head_figures,
    needle_lengths,
    retrieval,
    token_losses,
    windows_of,
)
from sharp.exporter.adapt.processes import Processes, join
from sharp.exporter.adapt.recipe import DTYPES, Recipe, fastest_dtype
from sharp.exporter.adapt.report import write_report
from sharp.exporter.adapt.speed import decode_speed
from sharp.exporter.adapt.state import STATE_FILE, read_state, state_of
from sharp.exporter.adapt.student import Student, check_norm, finish, make_student
from sharp.exporter.adapt.text import Text, encode, read_text
from sharp.exporter.adapt.training import Progress, memory_error, seconds_per_token, train
from sharp.exporter.checkpoints.norm_options import NO_OPTIONS, NormOptions
from sharp.exporter.checkpoints.path_checks import check_adaptable
from sharp.exporter.staging import Staging, remove_stale
from sharp.exporter.verification.perplexity import licence, perplexity
from sharp.models.adapted_model import attention_norms
from sharp.models.tasks.scoring import memory_of
from sharp.plugins.errors import InputError, NotFoundError, SharpError

LONG_SHARE = 0.5  # of the tokens of a long stage, in sequences of the model's context
MEASURED = 4  # times the length of training, the least context of the perplexities by position
MEASURED_SHARE = 0.4  # of the time of training, what longer ones may take
# A window of n tokens takes as long, in teacher, raw swap and student together, as training on n WINDOW_TOKENS
# (1 + n / EVEN_LENGTH) tokens: SmolLM2 with entmax on a CPU, where n of 8,192 is four times its tokens.
WINDOW_TOKENS, EVEN_LENGTH = 0.8, 2048
WINDOWS_VERSION = 2  # of where the perplexities are measured: a run of another would compare two kinds
EVALUATIONS = 10  # of the held-out text while training
MEASURED_FILE = "before.json"  # teacher and raw swap, beside the state of a run
WORK_FILES = {name + end for name in (STATE_FILE, MEASURED_FILE) for end in ("", ".partial")}
Measured = dict[str, Any]


@dataclass(frozen=True)
class AdaptSettings:
    """What the user chose; the fields are the options of `sharp adapt`.

    Attributes:
        text: files and folders.
        budget: the time of training in seconds.
        dtype: of matrix products in training; "auto" is bfloat16 on an x86 processor or a GPU with instructions
            for it.
        layers: the first and the last whose projections are adapted; None: all.
        measure_length: the longest context of the perplexities by position; None: as far as the model goes, or two
            fifths of the time of training, and four times `length` at least.
    """

    norm: str
    norm_options: NormOptions = NO_OPTIONS
    text: tuple[Path | str, ...] = ()
    held_out: Path | str | None = None
    length: int = 256
    tokens: int = 100_000
    budget: float | None = None
    batch: int = 1
    rank: int = 16
    layers: tuple[int, int] | None = None
    stage: str = "short"
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    keep_adapter: bool = False
    measure_length: int | None = None
    measure_speed: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.text, str | Path):
            raise InputError(f"text is {self.text!r}, but must be a tuple of files and folders")
        for name, least, most in (
            ("length", 8, 2**20),
            ("tokens", 1, 10**12),
            ("batch", 1, 4096),
            ("rank", 1, 1024),
            ("seed", 0, 2**31),
        ):
            if not least <= getattr(self, name) <= most:
                raise InputError(f"--{name} is {getattr(self, name)}, but must be from {least} to {most}")
        if self.measure_length is not None and self.measure_length < self.length:
            raise InputError(f"--measure-length is {self.measure_length}, but must be at least --length, {self.length}")
        if self.budget is not None and not 1 <= self.budget <= 10**7:
            raise InputError(f"--budget is {self.budget:g} seconds, but must be from 1 second to 100 days")
        if self.stage not in ("short", "long"):
            raise InputError(f"--stage is {self.stage!r}, but must be short or long")
        if self.dtype not in ("auto", *DTYPES):
            raise InputError(f"--dtype is {self.dtype!r}, but must be auto, {' or '.join(DTYPES)}")


# phase(name, steps) announces the next phase; what it returns is called after each of its steps.
Phase = Callable[[str, int], Callable[[], None]]


def no_phase(_name: str, _steps: int) -> Callable[[], None]:
    """Announces nothing."""
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

    A run that was killed goes on where its state, in `folder` with ".partial" behind its name, was saved last. Returns
    the report; None with `stop_after`, which ends early, as if killed after that step, and in all processes of
    torchrun but the first.

    Raises:
        InputError, NotFoundError: the checkpoint, the text or a setting cannot be used.
        SharpError: the loss is not finite any more, or the result cannot be written.
    """
    if not isinstance(path, Path | str):
        raise InputError(
            f"sharp.adapt takes the path of a Hugging Face folder or a .gguf file, not {type(path).__name__}; for a "
            "module of your own there is sharp.adapt_module, see docs/your-own-model.md"
        )
    path, folder = Path(path), Path(folder)
    check_adaptable(path)
    check_norm(settings.norm, settings.norm_options)
    work = folder.resolve().with_name(f"{folder.resolve().name}.partial")
    _check_output(folder, work)
    processes, device = join(settings.device)
    if settings.batch % processes.count:
        raise InputError(f"--batch is {settings.batch}, but must be a multiple of the {processes.count} processes")
    phase("Reading the checkpoint", 1)
    layers = None if settings.layers is None else range(settings.layers[0], settings.layers[1] + 1)
    student = make_student(
        path, settings.norm, settings.norm_options, settings.rank, layers, settings.length, settings.seed
    )
    config = student.decoder.config
    _check_memory(student, device)
    phase("Reading the text", 1)
    long_length = config.max_context if settings.stage == "long" else settings.length
    shorter = "--stage short" if long_length > settings.length else "a smaller --length"
    least = max(settings.length, long_length) + 1
    paths = tuple(map(Path, settings.text))
    text = read_text(paths, student.opened.tokenizer, config.vocab_size, least, shorter)
    unlike = _unlike_text(settings, student)
    nn.Module.to(student.model, device)
    identity = _identity(student, settings, text, unlike[1], processes.count)
    state = state_of(work, identity)
    try:
        recipe = state.recipe if state is not None else _recipe(settings, student, text, long_length, processes)
        work.mkdir(parents=True, exist_ok=True)
        longest = settings.measure_length or measured_length(
            recipe, config.max_context, (len(text.held_out), len(unlike[1]))
        )
        measure = partial(_measure, student, settings.length, min(config.max_context, longest), text, unlike)
        of_run = f"{identity} {longest}"
        before = _measure_before(work, of_run, student, measure, phase, state is None) if processes.first else {}
        done = 0 if state is None else state.step
        going_on = f", of which {done} are done" if done else ""
        training = f"Training {recipe.steps} steps of {settings.length * settings.batch} tokens{going_on}"
        advance = phase(training, recipe.steps)
        for _ in range(done):
            advance()
        windows = windows_of(text.held_out, settings.length, 4)
        every = max(1, recipe.steps // EVALUATIONS)

        def after(progress: Progress) -> None:
            advance()
            measured = processes.first and (progress.step % every == 0 or progress.step == recipe.steps)
            on_step(progress, perplexity(token_losses(student, windows)) if measured else None)

        train(student, text.train, recipe, work, identity, after, stop_after, processes)
        if not processes.first or (stop_after is not None and stop_after < recipe.steps):
            return None
        final = read_state(work)
        assert final is not None
        figures = measure(phase("Measuring the student", 16))
    except (MemoryError, RuntimeError) as error:  # torch's own of a CPU is a RuntimeError
        said = memory_error(error, Recipe(1, settings.length, settings.batch))
        if said is error:
            raise
        raise said from error
    report = {
        "teacher": {
            "name": path.resolve().name,
            "architecture": type(student.model).__name__,
            "sha256": student.opened.sha256,
        },
        "norm": settings.norm,
        "alpha": student.described.alpha if student.described.scheme.normalizer == "entmax" else None,
        "recipe": asdict(recipe) | {"tokens": recipe.tokens, "rank": settings.rank},
        "text": text.name,
        "text_sha256": _digest(text.train),
        "unlike": unlike[0],
        "seconds": round(final.seconds, 1),
        "device": str(device),
        "processes": processes.count,
        "versions": {name: version(name) for name in ("torch", "transformers", "peft", "sharp-attention")},
        **before,
        "student": figures,
    }
    phase("Writing the model", 1)
    _write(student, settings, path, folder.resolve(), report, phase)
    shutil.rmtree(work, ignore_errors=True)
    return report


def _unlike_text(settings: AdaptSettings, student: Student) -> tuple[str, Tensor]:
    """A text unlike the one that is trained on: the user's, or Sharp's licence."""
    path = licence() if settings.held_out is None else Path(settings.held_out)
    if not path.is_file():
        said = "is a folder" if path.is_dir() else "does not exist"
        raise NotFoundError(f"text {path} {said}; give a file with --held-out")
    content = path.read_text(encoding="utf-8", errors="replace")
    tokens = encode(content, student.opened.tokenizer, student.decoder.config.vocab_size, path.name)
    if len(tokens) < 16:
        raise InputError(f"text {path} is too short: {len(tokens)} tokens; give another with --held-out")
    return path.name, tokens


def _check_output(folder: Path, work: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file, where a folder is to be written; choose another with -o")
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"the output folder {folder} is not empty; choose another with -o, or remove it first")
    if work.exists() and (not work.is_dir() or {one.name for one in work.iterdir()} - WORK_FILES):
        raise InputError(f"{work}, where the state of the run is to be kept, is something else; choose another -o")
    parent = next(one for one in work.parents if one.exists())
    if not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"nothing can be written to {parent}; choose another folder with -o")


def _check_memory(student: Student, device: torch.device) -> None:
    weights = sum(parameter.numel() for parameter in student.model.parameters())
    needed, there = 4 * weights * 3 // 2, memory_of(device)
    if needed > there:
        raise InputError(
            f"the model's {weights:,} weights need {needed / 2**30:,.0f} GiB of memory in training, there are "
            f"{there / 2**30:.0f}; choose a smaller model, or a machine with more"
        )


def _digest(tokens: Tensor) -> str:
    return hashlib.sha256(tokens.numpy().tobytes()).hexdigest()


def _identity(student: Student, settings: AdaptSettings, text: Text, unlike: Tensor, processes: int) -> str:
    """What two runs must share for one to continue the other."""
    fields = asdict(settings)
    for name in ("text", "held_out", "keep_adapter", "measure_speed", "device"):
        fields.pop(name)
    fields |= {"teacher": student.opened.sha256, "text": _digest(text.train), "unlike": _digest(unlike)}
    fields |= {"processes": processes, "windows": WINDOWS_VERSION}
    if student.described.scheme.normalizer == "adaptive_softmax":
        fields["temperature"] = student.described.temperature_coefficients
    return json.dumps(fields, sort_keys=True, default=str)


def _recipe(settings: AdaptSettings, student: Student, text: Text, long_length: int, processes: Processes) -> Recipe:
    """The steps that `--tokens` gives, or fewer where `--budget` is less time than they take."""
    batch, length, tokens = settings.batch, settings.length, settings.tokens
    long_batch = processes.count
    fast = processes.of_first(fastest_dtype(next(student.model.parameters()).device) == "bfloat16")
    dtype = ("bfloat16" if fast else "float32") if settings.dtype == "auto" else settings.dtype
    if settings.budget is not None:
        own = (batch // processes.count, length)
        shapes = [own, (1, long_length)] if long_length > length else [own]
        seconds = fmean(seconds_per_token(student, text.train, *shape, dtype) for shape in shapes)
        tokens = min(tokens, int(processes.of_first(settings.budget / seconds * processes.count)))
    long_steps = max(1, round(tokens * LONG_SHARE / (long_length * long_batch))) if long_length > length else 0
    short_steps = max(1, (tokens - long_steps * long_length * long_batch) // (batch * length))
    steps, longest = short_steps + long_steps, long_length if long_steps else 0
    return Recipe(steps, length, batch, long_steps, longest, long_batch, settings.seed, dtype=dtype)


def measured_length(recipe: Recipe, context: int, texts: Sequence[int]) -> int:
    """The longest context of the perplexities by position, in texts of so many tokens.

    The model's, where that takes two fifths of the time of training at most. No clock is read, so a run that is resumed
    has the same windows.
    """
    longest = max(MEASURED * recipe.length, recipe.long_length)
    while longest < context:
        longer = min(2 * longest, context)
        windows = [min(longer, text) for text in texts]
        if sum(WINDOW_TOKENS * one * (1 + one / EVEN_LENGTH) for one in windows) > MEASURED_SHARE * recipe.tokens:
            break
        longest = longer
    return min(longest, context)


def _measure_before(
    work: Path, of_run: str, student: Student, measure: Callable[..., Measured], phase: Phase, at_start: bool
) -> Measured:
    """Teacher and raw swap; kept beside the state, as a run that is resumed has no raw swap any more.

    `of_run` says what is measured. What a run with other settings has left is measured again `at_start`.
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


def _measure(
    student: Student,
    length: int,
    longest: int,
    text: Text,
    unlike: tuple[str, Tensor],
    advance: Callable[[], None],
    *,
    needles: bool = True,
) -> Measured:
    """The figures of one model, in windows of `length` tokens, and by position up to `longest`."""
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


def _head_parameters(student: Student) -> dict[str, float]:
    """What the median head has learned, by the names of the norm's parameters."""
    found = [one.head_params() for one in attention_norms(student.model)]
    rows = [one.detach().cpu() for one in found if one is not None]
    if not rows:
        return {}
    names = student.described.scheme.head_parameters
    return {name: round(median.item(), 3) for name, median in zip(names, torch.cat(rows).median(0).values, strict=True)}


def _write(
    student: Student, settings: AdaptSettings, teacher: Path, target: Path, report: Measured, phase: Phase
) -> None:
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
    except Exception as error:  # a full disk is an OSError, or an error of safetensors' own
        if isinstance(error, OSError) or "No space" in str(error) or type(error).__name__ == "SafetensorError":
            raise SharpError(
                f"the model cannot be written to {target.parent}: {error}; make room and run the same command again"
            ) from error
        raise
    finally:
        if staging is not None:
            staging.remove()
