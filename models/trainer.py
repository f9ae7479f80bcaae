"""The training loop, which is resumable and deterministic and never overwrites a good state with a broken one."""

import csv
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn

from sharp.core.errors import InputError, SharpError
from sharp.models.checkpoint import Model, read_checkpoint, save_checkpoint
from sharp.models.objective import TrainingBatch
from sharp.models.objective import loss as objective

ModelT = TypeVar("ModelT", bound=Model)


@dataclass(frozen=True)
class Stage:
    """A stage of training, in which sequences have `length` tokens, or a random length for each step.

    The stage begins at `start_step`. With `longest`, a step's length is uniformly chosen from `length`,
    `length + every`, ... up to `longest`.

    Raises:
        InputError: the lengths are not positive or not in order.
    """

    start_step: int
    length: int
    longest: int | None = None
    every: int = 1

    def __post_init__(self) -> None:
        if self.length < 1 or self.every < 1 or (self.longest is not None and self.longest < self.length):
            raise InputError(
                f"lengths {self.length} to {self.longest} cannot be trained on: they must be at least 1 and in order"
            )

    @property
    def lengths(self) -> range:
        """The possible lengths of the stage, in ascending order."""
        return range(self.length, (self.longest or self.length) + 1, self.every)


@dataclass(frozen=True)
class TrainSettings:
    """The settings of a run, which is resumed only with the same settings.

    A step's batch has `batch_sequences` sequences or, if that is 0, as many sequences as make `batch_tokens` tokens.

    Raises:
        InputError: no run can have these settings; the message names the field.
    """

    steps: int
    stages: tuple[Stage, ...]
    batch_tokens: int = 0
    batch_sequences: int = 0
    learning_rate: float = 2e-3
    final_learning_rate: float = 1e-4
    warmup_steps: int = 100
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    gradient_clip: float = 1.0
    seed: int = 0
    bfloat16: bool = False
    compile: bool = False
    log_every: int = 25
    save_every: int = 200
    validate_every: int = 500

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise InputError(f"steps is {self.steps}, but must be at least 1")
        if (self.batch_tokens > 0) == (self.batch_sequences > 0):
            raise InputError("one of batch_tokens and batch_sequences must be above 0, and the other must be 0")
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise InputError(f"learning_rate is {self.learning_rate}, but must be above 0")
        if not 0 <= self.final_learning_rate <= self.learning_rate:
            raise InputError(
                f"final_learning_rate is {self.final_learning_rate}, but must be from 0 to {self.learning_rate}, the "
                "learning rate"
            )

    def batch_at(self, step: int, generator: torch.Generator) -> tuple[int, int]:
        """Return the number of sequences and of tokens per sequence in this step (from 0).

        `generator` chooses the length if the stage has several.
        """
        lengths = [stage for stage in self.stages if stage.start_step <= step][-1].lengths
        index = int(torch.randint(len(lengths), (), generator=generator)) if len(lengths) > 1 else 0
        return self.batch_sequences or self.batch_tokens // lengths[index], lengths[index]

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of a step (from 0): linear warm-up, then half a cosine to `final_learning_rate`."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.final_learning_rate + (self.learning_rate - self.final_learning_rate) * 0.5 * (
            1 + math.cos(math.pi * progress)
        )


Sampler = Callable[[int, int, torch.Generator], TrainingBatch]  # (number of sequences, length, generator) -> batch
Best = Callable[[float, float], float]  # max or min, whichever returns the better of two validations


def train(
    model: ModelT,
    sample: Sampler,
    validate: Callable[[ModelT], float],
    settings: TrainSettings,
    folder: Path,
    stop_after: int | None = None,
    measure: str = "bits_per_byte",
    task: str | None = None,
    data: str = "",
    task_parameters: Mapping[str, Any] | None = None,
    best: Best | None = None,
) -> None:
    """Train `model` in place for `settings.steps` steps, or continue the run that `folder` holds.

    Batches depend on seed and step alone, so a resumed run gives the same weights as an uninterrupted run. The model
    stays on its device and ends in evaluation mode.

    Args:
        model: the model to train.
        sample: makes a batch, called with the number of sequences, their length and a random generator.
        validate: scores the model, which is in evaluation mode; called every `settings.validate_every` steps and at the
            end.
        settings: the settings of the run.
        folder: receives state.pt (model and optimizer), latest.safetensors, loss.csv and best.safetensors.
        stop_after: end the run after this step, as if it had been killed once the step was saved.
        measure: the result of `validate` is in the column validation_`measure` of loss.csv.
        task: the task's name, which is kept in the checkpoint.
        data: a description of the samples; a run is resumed only with the same description.
        task_parameters: the task's parameters, which are kept in the checkpoint.
        best: end with the weights of the best validation, the last of equals, which are kept in best.safetensors;
            None ends with those of the last step.

    Raises:
        InputError: `folder` holds a run with other settings, or the state cannot be written.
        SharpError: the loss is no longer finite; the last good state is kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    optimizer = make_optimizer(model, settings)
    state = resume(model, optimizer, settings, folder, data)
    step, saved, best_score = state.step, state.step, state.best_score
    device = next(model.parameters()).device
    log = LossLog(folder / "loss.csv", step, settings, measure)
    loss_function = torch.compile(batch_loss, dynamic=False) if settings.compile else batch_loss
    last = settings.steps if stop_after is None else min(stop_after, settings.steps)
    started = time.monotonic() - state.seconds
    losses: list[float] = []  # since the last row of the log
    with progress_bar() as progress:
        bar = progress.add_task(f"training {model.config.norm}", total=settings.steps, completed=step, loss="")
        while step < last:
            learning_rate = settings.learning_rate_at(step)
            generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + step)
            sequences, length = settings.batch_at(step, generator)
            batch = sample(sequences, length, generator).to(device)
            losses.append(_descend(model, optimizer, loss_function, batch, learning_rate, settings))
            if not math.isfinite(losses[-1]):
                raise _not_finite(step, saved, folder)
            step += 1
            progress.update(bar, completed=step, loss=f"loss {losses[-1]:.3f}")
            validation = None
            if step % settings.validate_every == 0 or step == settings.steps:
                model.eval()
                validation = validate(model)
                if best is not None and (best_score is None or best(validation, best_score) == validation):
                    best_score = validation
                    save_checkpoint(folder / "best.safetensors", model, torch.float16, task, task_parameters)
            elapsed = time.monotonic() - started
            if step % settings.log_every == 0 or validation is not None:
                log.write(step, elapsed, length, losses, validation)
                losses = []
            if step % settings.save_every == 0 or step == last:
                done = TrainingState(step, elapsed, best_score)
                save_state(model, optimizer, settings, folder, done, data, task, task_parameters)
                saved = step
    if best_score is not None:
        model.load_state_dict(read_checkpoint(folder / "best.safetensors").model.state_dict())
    model.eval()


def _descend(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_function: Callable[..., Tensor],
    batch: TrainingBatch,
    learning_rate: float,
    settings: TrainSettings,
) -> float:
    """Take one step of the optimizer and return the loss; NaN, without a step, if loss or gradient is not finite.

    `loss_function` gets the model, the inputs and the targets of the batch.
    """
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    model.train()
    with torch.autocast(batch.targets.device.type, torch.bfloat16, enabled=settings.bfloat16):
        loss = loss_function(model, batch.inputs, batch.targets)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), settings.gradient_clip)
    if not (loss.isfinite() and norm.isfinite()):
        return math.nan
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _not_finite(step: int, saved: int, folder: Path) -> SharpError:
    """Return the error for a loss that is NaN or infinite at `step`; `saved` is the last saved step, 0 if none."""
    kept = f"the last good state, of step {saved}, is in {folder}" if saved else "nothing was saved yet"
    return SharpError(
        f"the loss is not finite at step {step}; {kept}: delete the folder and train again with a lower learning rate"
    )


def batch_loss(model: nn.Module, inputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
    """Compute the loss (`sharp.models.objective.loss`) of a batch.

    The batch is given as tensors and not as `TrainingBatch`, because torch.compile needs tensors.
    """
    return objective(model(*inputs), targets)


def make_optimizer(model: nn.Module, settings: TrainSettings) -> torch.optim.AdamW:
    """Make AdamW with weight decay on matrices only, so RMSNorm weights and norms' parameters per head do not decay."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=settings.learning_rate,
        betas=settings.betas,
        fused=True,
    )


@dataclass(frozen=True)
class TrainingState:
    """Steps done, seconds spent, and the score of best.safetensors (None if there is none)."""

    step: int = 0
    seconds: float = 0.0
    best_score: float | None = None


def save_state(
    model: Model,
    optimizer: torch.optim.Optimizer,
    settings: TrainSettings,
    folder: Path,
    done: TrainingState,
    data: str,
    task: str | None,
    task_parameters: Mapping[str, Any] | None,
) -> None:
    """Write the state that `resume` reads, as a whole or not at all, because the process may be killed while writing.

    Raises:
        InputError: the state cannot be written, for example because the disk is full.
    """
    state = {
        "settings": identity(model, settings, data),
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        **asdict(done),
    }
    partial = folder / "state.pt.partial"
    try:
        with partial.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(folder / "state.pt")
        save_checkpoint(folder / "latest.safetensors", model, torch.float16, task, task_parameters)
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError when it closes a file that it could not write
        partial.unlink(missing_ok=True)
        reason = error if isinstance(error, OSError) else error.__context__ or error
        raise InputError(
            f"the state of the run cannot be written to {folder}: {reason}; make room, then run the same command again"
        ) from error


def resume(
    model: Model, optimizer: torch.optim.Optimizer, settings: TrainSettings, folder: Path, data: str
) -> TrainingState:
    """Load the state in `folder`, if any, into model and optimizer, in place; without one no step is done.

    Raises:
        InputError: the state is of a run with other settings or data.
    """
    path = folder / "state.pt"
    if not path.exists():
        return TrainingState()
    state = torch.load(path, map_location="cpu", weights_only=True)
    if state["settings"] != identity(model, settings, data):
        raise InputError(f"{folder} holds a run with other settings; delete it or name another folder with --work")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    # A state of an older version has no score.
    return TrainingState(state["step"], state["seconds"], state.get("best_score"))


def identity(model: Model, settings: TrainSettings, data: str) -> str:
    """Return all that two runs must share for one to continue the other, as text; weights are not part of it."""
    return f"{asdict(model.config)} {asdict(settings)} {data}"


class LossLog:
    """A CSV file of the losses, made anew with its header if `step` is 0.

    Otherwise its rows up to `step`, the step of the resumed state, are kept, and later ones are dropped. The last
    column is validation_`measure`.
    """

    def __init__(self, path: Path, step: int, settings: TrainSettings, measure: str) -> None:
        self.path = path
        self.settings = settings
        amount = "tokens" if settings.batch_tokens else "sequences"
        columns = ("step", amount, "seconds", "length", "learning_rate", "train_loss", f"validation_{measure}")
        kept: list[list[str]] = []
        if step and path.exists():
            with path.open(newline="") as file:
                # An incomplete row, from a full disk, is dropped.
                kept = [row for row in list(csv.reader(file))[1:] if len(row) == len(columns) and int(row[0]) <= step]
        partial = path.with_name(f"{path.name}.partial")
        with partial.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([columns, *kept])
        partial.replace(path)

    def write(self, step: int, seconds: float, length: int, losses: Sequence[float], validation: float | None) -> None:
        """Append the row of a step: `seconds` since the start, `length` of the sequences, and the mean of `losses`.

        `losses` are those since the row before. `validation` is the loss on held-out data; None leaves its cell empty.
        """
        amount = step * (self.settings.batch_tokens or self.settings.batch_sequences)
        learning_rate = self.settings.learning_rate_at(step - 1)
        loss, shown = sum(losses) / len(losses), "" if validation is None else f"{validation:.4f}"
        with self.path.open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(
                [step, amount, f"{seconds:.0f}", length, f"{learning_rate:.6f}", f"{loss:.4f}", shown]
            )


def progress_bar() -> Progress:
    """Make a progress bar with steps, loss, time spent and time left."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
