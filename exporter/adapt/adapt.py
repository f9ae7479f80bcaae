"""`sharp adapt`, step by step: read, measure, distil, measure again, then show the folder whole or not at all."""

import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from sharp.exporter.adapt.figures import (
    by_position,
    head_figures,
    needle_lengths,
    perplexity,
    retrieval,
    token_losses,
    windows_of,
)
from sharp.exporter.adapt.processes import Processes, join
from sharp.exporter.adapt.report import write_report
from sharp.exporter.adapt.speed import decode_speed
from sharp.exporter.adapt.student import Student, finish, make_student
from sharp.exporter.adapt.text import Text, encode, read_text
from sharp.exporter.adapt.training import Progress, Recipe, memory_error, read_state, seconds_per_token, train
from sharp.exporter.checkpoints.norm_options import NO_OPTIONS, NormOptions
from sharp.exporter.checkpoints.source import check_exists
from sharp.exporter.verification.perplexity import licence
from sharp.models.adapted_model import attention_norms
from sharp.models.tasks.scoring import memory_of
from sharp.plugins.errors import InputError, NotFoundError, SharpError

LONG_SHARE = 0.5  # of the tokens of a long stage, in sequences of the model's context
MEASURED = 4  # times the length of training, the longest context of the perplexities by position
EVALUATIONS = 10  # of the held-out text while training
Measured = dict[str, Any]


@dataclass(frozen=True)
class AdaptSettings:
    """What the user chose; the fields are the options of `sharp adapt`. `budget` is the time of training in seconds."""

    norm: str
    norm_options: NormOptions = NO_OPTIONS
    text: tuple[Path, ...] = ()
    held_out: Path | None = None
    length: int = 256
    tokens: int = 100_000
    budget: float | None = None
    batch: int = 1
    rank: int = 16
    layers: tuple[int, int] | None = None  # first and last
    stage: str = "short"
    seed: int = 0
    device: str = "auto"
    keep_adapter: bool = False
    measure_speed: bool = False

    def __post_init__(self) -> None:
        for name, least, most in (
            ("length", 8, 2**20),
            ("tokens", 1, 10**12),
            ("batch", 1, 4096),
            ("rank", 1, 1024),
            ("seed", 0, 2**31),
        ):
            if not least <= getattr(self, name) <= most:
                raise InputError(f"--{name} is {getattr(self, name)}, but must be from {least} to {most}")
        if self.budget is not None and not 1 <= self.budget <= 10**7:
            raise InputError(f"--budget is {self.budget:g} seconds, but must be from 1 second to 100 days")
        if self.stage not in ("short", "long"):
            raise InputError(f"--stage is {self.stage!r}, but must be short or long")


# phase(name, steps) announces the next phase; what it returns is called after each of its steps.
Phase = Callable[[str, int], Callable[[], None]]


def no_phase(_name: str, _steps: int) -> Callable[[], None]:
    """Announces nothing."""
    return lambda: None


def adapt(
    path: Path,
    settings: AdaptSettings,
    folder: Path,
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
    check_exists(path)
    if path.is_file() and path.suffix != ".gguf":
        raise InputError(f"{path} is no Hugging Face folder and no .gguf file, which is what sharp adapt takes")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"the output folder {folder} is not empty; choose another with -o, or remove it first")
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
    least = max(settings.length, long_length) + 1
    text = read_text(settings.text, student.opened.tokenizer, config.vocab_size, least)
    unlike = _unlike_text(settings, student)
    nn.Module.to(student.model, device)
    work = folder.resolve().with_name(f"{folder.resolve().name}.partial")
    identity = _identity(student, settings, text, processes.count)
    state = read_state(work)
    if state is not None and state.identity != identity:
        raise InputError(f"{work} holds a run with other settings; remove it, or choose another folder with -o")
    try:
        recipe = state.recipe if state is not None else _recipe(settings, student, text, long_length, processes)
        work.mkdir(parents=True, exist_ok=True)
        before = _measure_before(work, student, settings, text, unlike, phase) if processes.first else {}
        advance = phase(f"Training {recipe.steps} steps of {settings.length * settings.batch} tokens", recipe.steps)
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
        figures = _measure(student, settings, text, unlike, phase("Measuring the student", 16), recipe)
    except torch.OutOfMemoryError as error:
        raise memory_error(error, Recipe(1, settings.length, settings.batch)) from error
    report = {
        "teacher": {
            "name": path.resolve().name,
            "architecture": type(student.model).__name__,
            "sha256": student.opened.sha256,
        },
        "norm": settings.norm,
        "alpha": student.described.alpha,
        "recipe": asdict(recipe) | {"tokens": recipe.tokens, "rank": settings.rank},
        "text": text.name,
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
    path = settings.held_out or licence()
    if not path.is_file():
        raise NotFoundError(f"text {path} does not exist; give a file with --held-out")
    content = path.read_text(encoding="utf-8", errors="replace")
    tokens = encode(content, student.opened.tokenizer, student.decoder.config.vocab_size, path.name)
    if len(tokens) < 16:
        raise InputError(f"text {path} is too short: {len(tokens)} tokens; give another with --held-out")
    return path.name, tokens


def _check_memory(student: Student, device: torch.device) -> None:
    weights = sum(parameter.numel() for parameter in student.model.parameters())
    needed, there = 4 * weights * 3 // 2, memory_of(device)
    if needed > there:
        raise InputError(
            f"the model's {weights:,} weights need {needed / 2**30:,.0f} GiB of memory in training, there are "
            f"{there / 2**30:.0f}; choose a smaller model, or a machine with more"
        )


def _identity(student: Student, settings: AdaptSettings, text: Text, processes: int) -> str:
    """What two runs must share for one to continue the other."""
    fields = asdict(settings)
    for name in ("text", "held_out", "keep_adapter", "measure_speed", "device"):
        fields.pop(name)
    digest = hashlib.sha256(text.train.numpy().tobytes()).hexdigest()
    fields |= {"teacher": student.opened.sha256, "text": digest, "processes": processes}
    return json.dumps(fields, sort_keys=True, default=str)


def _recipe(settings: AdaptSettings, student: Student, text: Text, long_length: int, processes: Processes) -> Recipe:
    """The steps that `--tokens` gives, or fewer where `--budget` is less time than they take."""
    batch, length, tokens = settings.batch, settings.length, settings.tokens
    long_batch = processes.count
    if settings.budget is not None:
        own = (batch // processes.count, length)
        shapes = [own, (1, long_length)] if long_length > length else [own]
        seconds = fmean(seconds_per_token(student, text.train, *shape) for shape in shapes)
        tokens = min(tokens, int(processes.of_first(settings.budget / seconds * processes.count)))
    long_steps = max(1, round(tokens * LONG_SHARE / (long_length * long_batch))) if long_length > length else 0
    short_steps = max(1, (tokens - long_steps * long_length * long_batch) // (batch * length))
    steps, longest = short_steps + long_steps, long_length if long_steps else 0
    return Recipe(steps, length, batch, long_steps, longest, long_batch, settings.seed)


def _measure_before(
    work: Path, student: Student, settings: AdaptSettings, text: Text, unlike: tuple[str, Tensor], phase: Phase
) -> Measured:
    """Teacher and raw swap; kept beside the state, as a run that is resumed has no raw swap any more."""
    kept = work / "before.json"
    if kept.is_file():
        content: Measured = json.loads(kept.read_text(encoding="utf-8"))
        return content
    advance = phase("Measuring the teacher", 32)
    with student.teacher():
        teacher = _measure(student, settings, text, unlike, advance)
    raw = _measure(student, settings, text, unlike, advance, needles=False)
    partial = kept.with_suffix(".partial")
    partial.write_text(json.dumps({"teacher_figures": teacher, "raw": raw}), encoding="utf-8")
    partial.replace(kept)
    return {"teacher_figures": teacher, "raw": raw}


def _measure(
    student: Student,
    settings: AdaptSettings,
    text: Text,
    unlike: tuple[str, Tensor],
    advance: Callable[[], None],
    recipe: Recipe | None = None,
    *,
    needles: bool = True,
) -> Measured:
    context = student.decoder.config.max_context
    longest = min(context, max(MEASURED * settings.length, 0 if recipe is None else recipe.long_length))
    found: Measured = {"seconds": 0.0}
    began = time.monotonic()
    for name, tokens in (("held_out", text.held_out), ("unlike", unlike[1])):
        short = token_losses(student, windows_of(tokens, settings.length))
        found[name] = {"perplexity": perplexity(short), "length": short.shape[1] + 1, "tokens": short.numel()}
        found[name]["by_position"] = by_position(token_losses(student, windows_of(tokens, longest, 2)))
    heads = head_figures(student, unlike[1])
    found["heads"] = {"entropy": heads.entropy, "support": heads.support}
    found["mean_entropy"], found["mean_support"] = heads.mean_entropy, heads.mean_support
    advance()
    if needles:
        rows = retrieval(student, needle_lengths(context, settings.length), advance)
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
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        described = finish(student, staging / "adapter" if settings.keep_adapter else None)
        report["scaled_queries"] = described.scaled_queries
        report["head_parameters"] = _head_parameters(student)
        nn.Module.to(student.model, "cpu")
        student.model.save_pretrained(staging)
        assert student.opened.tokenizer is not None
        student.opened.tokenizer.save_pretrained(staging)
        if settings.measure_speed:
            learned = student.opened.architecture.positions == "learned"
            longest = student.decoder.config.max_context if learned else 2**20
            report["speed"] = decode_speed(teacher, staging, longest, phase("Measuring the decode speed", 3))
        write_report(report, staging)
        staging.chmod(0o755)  # mkdtemp's folders are private
        staging.replace(target)
    except Exception as error:  # a full disk is an OSError, or an error of safetensors' own
        if isinstance(error, OSError) or "No space" in str(error) or type(error).__name__ == "SafetensorError":
            raise SharpError(
                f"the model cannot be written to {target.parent}: {error}; make room and run the same command again"
            ) from error
        raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
