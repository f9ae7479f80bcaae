"""The training loop: resumable, deterministic, and it never overwrites a good state with a broken one."""

import csv
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.nn import functional

from sharp.models.causal_lm import SharpForCausalLM
from sharp.models.checkpoint import save_checkpoint
from sharp.plugins.errors import InputError, SharpError

LOG_COLUMNS = ("step", "tokens", "seconds", "length", "learning_rate", "train_loss", "validation_bits_per_byte")


@dataclass(frozen=True)
class Stage:
    """From `start_step` on, sequences have `length` tokens."""

    start_step: int
    length: int


@dataclass(frozen=True)
class TrainSettings:
    """How to train; a run is resumed only with the settings that it was started with."""

    steps: int
    batch_tokens: int
    stages: tuple[Stage, ...]
    learning_rate: float = 2e-3
    final_learning_rate: float = 1e-4
    warmup_steps: int = 100
    weight_decay: float = 0.1
    gradient_clip: float = 1.0
    seed: int = 0
    bfloat16: bool = False
    compile: bool = False
    log_every: int = 25
    save_every: int = 200
    validate_every: int = 500

    def length_at(self, step: int) -> int:
        """Tokens per sequence in this step."""
        return [stage.length for stage in self.stages if stage.start_step <= step][-1]

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up, then half a cosine down to `final_learning_rate`."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.final_learning_rate + (self.learning_rate - self.final_learning_rate) * 0.5 * (
            1 + math.cos(math.pi * progress)
        )


# (sequences, length, generator) -> int64 [sequences, length + 1]: inputs and, shifted by one, targets
Sampler = Callable[[int, int, torch.Generator], Tensor]


def train(
    model: SharpForCausalLM,
    sample: Sampler,
    validate: Callable[[SharpForCausalLM], float],
    settings: TrainSettings,
    folder: Path,
    stop_after: int | None = None,
) -> None:
    """Train `model` in place for `settings.steps` steps, or continue the run that `folder` holds.

    Batches depend on seed and step alone, so a run that was killed and resumed gives the weights of one that was not.
    `folder` gets state.pt (model and optimizer), latest.safetensors and loss.csv. `stop_after` ends early, as if
    killed after that step had been saved.

    Raises:
        InputError: `folder` holds a run with other settings.
        SharpError: the loss is not finite any more; the last good state is kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    optimizer = make_optimizer(model, settings)
    step, seconds = resume(model, optimizer, settings, folder)
    log = LossLog(folder / "loss.csv", step)
    loss_function = torch.compile(next_token_loss, dynamic=False) if settings.compile else next_token_loss
    last = settings.steps if stop_after is None else min(stop_after, settings.steps)
    started = time.monotonic() - seconds
    train_loss, since_log = 0.0, 0
    with progress_bar() as progress:
        bar = progress.add_task(f"training {model.config.norm}", total=settings.steps, completed=step, loss="")
        while step < last:
            length = settings.length_at(step)
            learning_rate = settings.learning_rate_at(step)
            generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + step)
            tokens = sample(settings.batch_tokens // length, length, generator)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            model.train()
            with torch.autocast("cpu", torch.bfloat16, enabled=settings.bfloat16):
                loss = loss_function(model, tokens)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), settings.gradient_clip)
            if not (loss.isfinite() and norm.isfinite()):
                raise SharpError(
                    f"the loss is not finite at step {step}; the last good state is in {folder}: "
                    "delete the folder and train again with a lower learning rate"
                )
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            train_loss, since_log = train_loss + loss.item(), since_log + 1
            progress.update(bar, completed=step, loss=f"loss {loss.item():.3f}")
            validation = None
            if step % settings.validate_every == 0 or step == settings.steps:
                validation = validate(model.eval())
            if step % settings.log_every == 0 or validation is not None:
                elapsed = time.monotonic() - started
                log.write(
                    step,
                    tokens=step * settings.batch_tokens,
                    seconds=elapsed,
                    length=length,
                    learning_rate=learning_rate,
                    train_loss=train_loss / since_log,
                    validation=validation,
                )
                train_loss, since_log = 0.0, 0
            if step % settings.save_every == 0 or step == last:
                save_state(model, optimizer, settings, folder, step, time.monotonic() - started)
    model.eval()


def next_token_loss(model: SharpForCausalLM, tokens: Tensor) -> Tensor:
    """Mean cross entropy in nats of tokens [sequences, length + 1], each predicted from those before it."""
    logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def make_optimizer(model: nn.Module, settings: TrainSettings) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices only, so that norms and the schemes' parameters per head are free."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=settings.learning_rate,
        betas=(0.9, 0.95),
        fused=True,
    )


def save_state(
    model: SharpForCausalLM,
    optimizer: torch.optim.Optimizer,
    settings: TrainSettings,
    folder: Path,
    step: int,
    seconds: float,
) -> None:
    """Write the state that `resume` reads; complete or not at all, as a kill may come while writing."""
    state = {
        "settings": identity(model, settings),
        "step": step,
        "seconds": seconds,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    partial = folder / "state.pt.partial"
    with partial.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(folder / "state.pt")
    save_checkpoint(folder / "latest.safetensors", model, torch.float16)


def resume(
    model: SharpForCausalLM, optimizer: torch.optim.Optimizer, settings: TrainSettings, folder: Path
) -> tuple[int, float]:
    """Load the state in `folder`, if there is one; (steps done, seconds spent)."""
    path = folder / "state.pt"
    if not path.exists():
        return 0, 0.0
    state = torch.load(path, weights_only=True)
    if state["settings"] != identity(model, settings):
        raise InputError(f"{folder} holds a run with other settings; delete it or name another folder with --work")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"], state["seconds"]


def identity(model: SharpForCausalLM, settings: TrainSettings) -> str:
    """What two runs must share for one to continue the other."""
    return f"{asdict(model.config)} {asdict(settings)}"


class LossLog:
    """A CSV file of the losses; rows past `step`, written after the state that is resumed, are dropped."""

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        kept: list[list[str]] = []
        if step and path.exists():
            with path.open(newline="") as file:
                kept = [row for row in list(csv.reader(file))[1:] if int(row[0]) <= step]
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([LOG_COLUMNS, *kept])

    def write(
        self,
        step: int,
        *,
        tokens: int,
        seconds: float,
        length: int,
        learning_rate: float,
        train_loss: float,
        validation: float | None,
    ) -> None:
        """Append one row."""
        shown = "" if validation is None else f"{validation:.4f}"
        with self.path.open("a", newline="") as file:
            csv.writer(file).writerow(
                [step, tokens, f"{seconds:.0f}", length, f"{learning_rate:.6f}", f"{train_loss:.4f}", shown]
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
