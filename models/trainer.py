"""The training loop: resumable, deterministic, and it never overwrites a good state with a broken one."""

import csv
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn

from sharp.models.checkpoint import Model, read_checkpoint, save_checkpoint
from sharp.models.objective import Batch
from sharp.models.objective import loss as objective
from sharp.plugins.errors import InputError, SharpError

ModelT = TypeVar("ModelT", bound=Model)


@dataclass(frozen=True)
class Stage:
    """From `start_step` on, sequences have `length` tokens, or a random number of them for each step.

    With `longest`, a step's length is one of `length`, `length + every`, ... up to `longest`, uniformly.

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
        """The lengths that may occur."""
        return range(self.length, (self.longest or self.length) + 1, self.every)


@dataclass(frozen=True)
class TrainSettings:
    """How to train; a run is resumed only with the settings that it was started with.

    A step's batch has `batch_sequences` sequences or, where that is 0, as many as make `batch_tokens`.

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
            raise InputError("a batch is of so many tokens or of so many sequences: one of the two must be above 0")
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise InputError(f"learning_rate is {self.learning_rate}, but must be above 0")
        if not 0 <= self.final_learning_rate <= self.learning_rate:
            raise InputError(
                f"final_learning_rate is {self.final_learning_rate}, but must be from 0 to {self.learning_rate}, the "
                "learning rate"
            )

    def batch_at(self, step: int, generator: torch.Generator) -> tuple[int, int]:
        """Sequences and tokens per sequence in this step."""
        lengths = [stage for stage in self.stages if stage.start_step <= step][-1].lengths
        index = int(torch.randint(len(lengths), (), generator=generator)) if len(lengths) > 1 else 0
        return self.batch_sequences or self.batch_tokens // lengths[index], lengths[index]

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up, then half a cosine down to `final_learning_rate`."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.final_learning_rate + (self.learning_rate - self.final_learning_rate) * 0.5 * (
            1 + math.cos(math.pi * progress)
        )


Sampler = Callable[[int, int, torch.Generator], Batch]  # of so many sequences of such a length
Best = Callable[[float, float], float]  # max or min: the better of two validations


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

    Batches depend on seed and step alone, so a run that was killed and resumed gives the weights of one that was not.
    `folder` gets state.pt (model and optimizer), latest.safetensors and loss.csv, where what `validate` returns is
    called validation_`measure`. `stop_after` ends early, as if killed after that step had been saved. `task` and
    `task_parameters` are kept in the checkpoint, `data` says what is sampled: a run is resumed only with the same. With
    `best` the model ends with the weights of its best validation, the later of equals, which best.safetensors has, and
    otherwise with those of the last step. The model stays on the device that it is on.

    Raises:
        InputError: `folder` holds a run with other settings, or the state cannot be written.
        SharpError: the loss is not finite any more; the last good state is kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    optimizer = make_optimizer(model, settings)
    step, seconds, best_score = resume(model, optimizer, settings, folder, data)
    saved = step
    device = next(model.parameters()).device
    log = LossLog(folder / "loss.csv", step, "tokens" if settings.batch_tokens else "sequences", measure)
    loss_function = torch.compile(batch_loss, dynamic=False) if settings.compile else batch_loss
    last = settings.steps if stop_after is None else min(stop_after, settings.steps)
    started = time.monotonic() - seconds
    train_loss, since_log = 0.0, 0
    with progress_bar() as progress:
        bar = progress.add_task(f"training {model.config.norm}", total=settings.steps, completed=step, loss="")
        while step < last:
            learning_rate = settings.learning_rate_at(step)
            generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + step)
            sequences, length = settings.batch_at(step, generator)
            batch = sample(sequences, length, generator).to(device)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            model.train()
            with torch.autocast(device.type, torch.bfloat16, enabled=settings.bfloat16):
                loss = loss_function(model, batch.inputs, batch.targets)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), settings.gradient_clip)
            if not (loss.isfinite() and norm.isfinite()):
                kept = f"the last good state, of step {saved}, is in {folder}" if saved else "nothing was saved yet"
                raise SharpError(
                    f"the loss is not finite at step {step}; {kept}: "
                    "delete the folder and train again with a lower learning rate"
                )
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            train_loss, since_log = train_loss + loss.item(), since_log + 1
            progress.update(bar, completed=step, loss=f"loss {loss.item():.3f}")
            validation = None
            if step % settings.validate_every == 0 or step == settings.steps:
                model.eval()
                validation = validate(model)
                if best is not None and (best_score is None or best(validation, best_score) == validation):
                    best_score = validation
                    save_checkpoint(folder / "best.safetensors", model, torch.float16, task, task_parameters)
            if step % settings.log_every == 0 or validation is not None:
                elapsed = time.monotonic() - started
                log.write(
                    step,
                    amount=step * (settings.batch_tokens or settings.batch_sequences),
                    seconds=elapsed,
                    length=length,
                    learning_rate=learning_rate,
                    train_loss=train_loss / since_log,
                    validation=validation,
                )
                train_loss, since_log = 0.0, 0
            if step % settings.save_every == 0 or step == last:
                save_state(
                    model,
                    optimizer,
                    settings,
                    folder,
                    step,
                    time.monotonic() - started,
                    data,
                    task,
                    task_parameters,
                    best_score,
                )
                saved = step
    if best_score is not None:
        model.load_state_dict(read_checkpoint(folder / "best.safetensors").model.state_dict())
    model.eval()


def batch_loss(model: nn.Module, inputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
    """The loss of a batch; tensors and no `Batch`, as torch.compile wants them."""
    return objective(model(*inputs), targets)


def make_optimizer(model: nn.Module, settings: TrainSettings) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices only, so that norms and the schemes' parameters per head are free."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=settings.learning_rate,
        betas=settings.betas,
        fused=True,
    )


def save_state(
    model: Model,
    optimizer: torch.optim.Optimizer,
    settings: TrainSettings,
    folder: Path,
    step: int,
    seconds: float,
    data: str,
    task: str | None,
    task_parameters: Mapping[str, Any] | None,
    best_score: float | None,
) -> None:
    """Write the state that `resume` reads; complete or not at all, as a kill may come while writing.

    Raises:
        InputError: it cannot be written, as on a full disk.
    """
    state = {
        "settings": identity(model, settings, data),
        "step": step,
        "seconds": seconds,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "best_score": best_score,
    }
    partial = folder / "state.pt.partial"
    try:
        with partial.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(folder / "state.pt")
        save_checkpoint(folder / "latest.safetensors", model, torch.float16, task, task_parameters)
    except (OSError, RuntimeError) as error:  # torch's own, while it ends the file that could not be written
        partial.unlink(missing_ok=True)
        reason = error if isinstance(error, OSError) else error.__context__ or error
        raise InputError(
            f"the state of the run cannot be written to {folder}: {reason}; make room, then run the same command again"
        ) from error


def resume(
    model: Model, optimizer: torch.optim.Optimizer, settings: TrainSettings, folder: Path, data: str
) -> tuple[int, float, float | None]:
    """Load the state in `folder`, if there is one; (steps done, seconds spent, score of best.safetensors)."""
    path = folder / "state.pt"
    if not path.exists():
        return 0, 0.0, None
    state = torch.load(path, map_location="cpu", weights_only=True)
    if state["settings"] != identity(model, settings, data):
        raise InputError(f"{folder} holds a run with other settings; delete it or name another folder with --work")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"], state["seconds"], state.get("best_score")  # states of older versions have no score


def identity(model: Model, settings: TrainSettings, data: str) -> str:
    """What two runs must share for one to continue the other."""
    return f"{asdict(model.config)} {asdict(settings)} {data}"


class LossLog:
    """A CSV file of the losses; rows past `step`, written after the state that is resumed, are dropped."""

    def __init__(self, path: Path, step: int, amount: str, measure: str) -> None:
        self.path = path
        columns = ("step", amount, "seconds", "length", "learning_rate", "train_loss", f"validation_{measure}")
        kept: list[list[str]] = []
        if step and path.exists():
            with path.open(newline="") as file:
                # A row that a full disk cut off is dropped.
                kept = [row for row in list(csv.reader(file))[1:] if len(row) == len(columns) and int(row[0]) <= step]
        partial = path.with_name(f"{path.name}.partial")
        with partial.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([columns, *kept])
        partial.replace(path)

    def write(
        self,
        step: int,
        *,
        amount: int,
        seconds: float,
        length: int,
        learning_rate: float,
        train_loss: float,
        validation: float | None,
    ) -> None:
        """Append one row."""
        shown = "" if validation is None else f"{validation:.4f}"
        with self.path.open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(
                [step, amount, f"{seconds:.0f}", length, f"{learning_rate:.6f}", f"{train_loss:.4f}", shown]
            )


def progress_bar() -> Progress:
    """Steps, loss, time spent and time left."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
