"""The distillation: deterministic, saved as it goes, and resumed to the same weights."""

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from sharp.exporter.adapt.processes import ALONE, Processes
from sharp.exporter.adapt.student import Student
from sharp.models.adapted_model import attention_norms
from sharp.plugins.errors import InputError, SharpError

STATE_FILE = "state.safetensors"
LOGITS_ROWS = 128  # tokens whose logits exist at once: of a large vocabulary, a gigabyte for a whole sequence
MOST_LOGITS = 2**25
SAVE_SECONDS = 30.0
CHECKPOINTED_LENGTH = 2048  # from here on activations are computed again in the backward pass
PROBE_STEPS = 2
FIRST_ALPHA = 1.05  # of entmax on the path from softmax


@dataclass(frozen=True)
class Recipe:
    """How to train; a run is resumed only with the recipe that it was started with.

    `long_steps` of the `steps` read `long_batch` sequences of `long_length` tokens, the others `batch` of `length`.
    The long ones are spread evenly: at the end, where the learning rate is nearly 0, they would teach nothing. All
    processes together read a batch.
    """

    steps: int
    length: int
    batch: int
    long_steps: int = 0
    long_length: int = 0
    long_batch: int = 1
    seed: int = 0
    path: bool = True  # entmax and adaptive temperature are reached from softmax, not there from the first step
    adapter_rate: float = 1e-3
    norm_rate: float = 2e-2
    warmup: int = 10
    clip: float = 1.0

    def shape_at(self, step: int) -> tuple[int, int]:
        """Sequences and tokens of a step."""
        before, after = (count * self.long_steps // self.steps for count in (step, step + 1))
        return (self.long_batch, self.long_length) if after > before else (self.batch, self.length)

    def rate_at(self, step: int) -> float:
        """The share of the learning rates: a linear warm-up times half a cosine."""
        return min(1.0, (step + 1) / self.warmup) * 0.5 * (1 + math.cos(math.pi * step / self.steps))

    @property
    def tokens(self) -> int:
        """Tokens of the whole run."""
        short = (self.steps - self.long_steps) * self.length * self.batch
        return short + self.long_steps * self.long_length * self.long_batch


@dataclass(frozen=True)
class Progress:
    """What is known after a step."""

    step: int
    steps: int
    loss: float
    divergence: float  # KL in nats per token
    hidden_error: float
    seconds: float


def batch_at(recipe: Recipe, tokens: Tensor, step: int) -> Tensor:
    """The sequences int64 [batch, length] of a step: they depend on seed and step alone."""
    batch, length = recipe.shape_at(step)
    generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
    starts = torch.randint(len(tokens) - length + 1, (batch,), generator=generator).tolist()
    return torch.stack([tokens[start : start + length] for start in starts])


def backward(student: Student, input_ids: Tensor, share: float) -> tuple[float, float]:
    """Add the gradients of one micro-batch; (KL per token, relative squared error of the hidden states)."""
    device = input_ids.device
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        with student.teacher():
            right, right_layers = student.hidden(input_ids, every_layer=True)
        found, layers = student.hidden(input_ids, every_layer=True)
        errors = [
            (one.float() - target.float()).square().mean() / target.float().square().mean()
            for one, target in zip(layers, right_layers, strict=True)
        ]
        hidden_error = torch.stack(errors).mean()
        rows, right_rows = found.flatten(0, 1), right.flatten(0, 1)
        divergence = found.new_zeros((), dtype=torch.float32)
        for part, target in zip(rows.split(LOGITS_ROWS), right_rows.split(LOGITS_ROWS), strict=True):
            # The logits of a short sequence fit, and need not be computed again.
            part_divergence = (
                checkpoint(_divergence, student, part, target, use_reentrant=False)
                if rows.shape[0] * student.decoder.config.vocab_size > MOST_LOGITS
                else _divergence(student, part, target)
            )
            divergence = divergence + part_divergence
        divergence = divergence / len(rows)
    ((divergence + hidden_error) * share).backward()
    return divergence.item(), hidden_error.item()


def _divergence(student: Student, rows: Tensor, right_rows: Tensor) -> Tensor:
    """Sum over tokens of KL(teacher || student)."""
    with torch.no_grad():
        right = functional.log_softmax(student.decoder.logits(right_rows).float(), -1)
    found = functional.log_softmax(student.decoder.logits(rows).float(), -1)
    return functional.kl_div(found, right, log_target=True, reduction="sum")


def seconds_per_token(student: Student, tokens: Tensor, batch: int, length: int) -> float:
    """Time of a token of training; the gradients are thrown away."""
    recipe = Recipe(PROBE_STEPS, length, batch)
    seconds = []
    for step in range(PROBE_STEPS):
        began = time.monotonic()
        with on_the_path(student, 0.0):  # where a step takes longest
            train_step(student, batch_at(recipe, tokens, step))
        seconds.append(time.monotonic() - began)
        for parameter in student.learned().values():
            parameter.grad = None
    return min(seconds) / (batch * length)


def train_step(student: Student, input_ids: Tensor) -> tuple[float, float]:
    """The gradients of a batch, a few sequences at a time; the mean of `backward`'s numbers."""
    device = next(student.model.parameters()).device
    length = input_ids.shape[1]
    at_once = max(1, (8192 if device.type == "cuda" else 512) // length)
    _checkpoint_layers(student.model, length >= CHECKPOINTED_LENGTH)
    divergence, error = 0.0, 0.0
    for part in input_ids.split(at_once):
        share = len(part) / len(input_ids)
        found = backward(student, part.to(device), share)
        divergence, error = divergence + share * found[0], error + share * found[1]
    return divergence, error


def _checkpoint_layers(model: nn.Module, checkpointed: bool) -> None:
    """Transformers checkpoints layers in training mode only; that of the layer alone brings no dropout."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if checkpointed and layers and not getattr(layers[0], "gradient_checkpointing", False):
        transformer: Any = model
        transformer.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in layers:
        layer.training = checkpointed


def alpha_at(share: float, target: float) -> float:
    """Entmax's alpha of a step before which this `share` of the run lies.

    It grows from near 1, where entmax is softmax, to its own in the middle of the run. After 100 steps on SmolLM2 the
    perplexity was 4 % below that of alpha 1.5 from the first step on (bench/results/adapt_walk_entmax.json).
    """
    return FIRST_ALPHA + (target - FIRST_ALPHA) * min(1.0, 2 * share)


def temperature_at(share: float, target: Sequence[float]) -> tuple[float, ...]:
    """Coefficients of the adaptive temperature, highest power first, of a step before which this `share` lies.

    With p for the polynomial of the norm, that of the step is 1 + w (p - 1), where w grows from 0 to 1 in the first
    half of the run: softmax first. On SmolLM2 the perplexities were 1 and 5 % below those without a path
    (bench/results/adapt_walk_adaptive_temperature.json).
    """
    way = min(1.0, 2 * share)
    *higher, last = target
    return (*(way * one for one in higher), 1 + way * (last - 1))


@contextmanager
def on_the_path(student: Student, share: float) -> Iterator[None]:
    """The student with the norm of a step before which this `share` of the run lies; some norms have no path."""
    target = student.described
    present = target
    if target.scheme.normalizer == "entmax":
        present = replace(target, alpha=alpha_at(share, target.alpha))
    elif target.scheme.normalizer == "adaptive_softmax":
        present = replace(target, temperature_coefficients=temperature_at(share, target.temperature_coefficients))
    norms = attention_norms(student.model)
    for norm in norms:
        norm.described = present
    try:
        yield
    finally:
        for norm in norms:
            norm.described = target


def train(
    student: Student,
    tokens: Tensor,
    recipe: Recipe,
    folder: Path,
    identity: str,
    on_step: Callable[[Progress], None],
    stop_after: int | None = None,
    processes: Processes = ALONE,
) -> None:
    """Train `student` for the recipe's steps, or go on with the run whose state is in `folder`.

    Every one of `processes` calls this with the same arguments, and the first saves. `stop_after` ends early, as if
    killed after that step had been saved.

    Raises:
        InputError: there is not enough memory.
        SharpError: the loss is not finite any more.
    """
    learned = student.learned()
    adapters = [one for name, one in learned.items() if "lora_" in name]
    norms = [one for name, one in learned.items() if "lora_" not in name]
    groups = [{"params": adapters, "lr": recipe.adapter_rate}, {"params": norms, "lr": recipe.norm_rate}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.0)
    device = next(iter(learned.values())).device
    rates = [group["lr"] for group in optimizer.param_groups]
    state = read_state(folder)
    processes.wait()  # the first writes when all have read
    step, seconds = (0, 0.0) if state is None else (state.step, state.seconds)
    if state is not None:
        load_state(folder, learned, optimizer, step)
    elif processes.first:
        save_state(folder, learned, optimizer, RunState(recipe, identity, 0, 0.0))
    began, saved = time.monotonic() - seconds, time.monotonic()
    last = recipe.steps if stop_after is None else min(stop_after, recipe.steps)
    while step < last:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * recipe.rate_at(step)
        try:
            with on_the_path(student, step / recipe.steps if recipe.path else 1.0):
                batch = processes.share(batch_at(recipe, tokens, step))
                losses = torch.tensor(train_step(student, batch), device=device)
        except (MemoryError, RuntimeError) as failure:
            raise memory_error(failure, recipe) from failure
        processes.average([losses, *(one.grad for one in learned.values() if one.grad is not None)])
        divergence, error = losses.tolist()
        norm = nn.utils.clip_grad_norm_(list(learned.values()), recipe.clip)
        if not (math.isfinite(divergence + error) and norm.isfinite()):
            raise SharpError(f"the loss is not finite at step {step}; start again with another --seed, or more --batch")
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if processes.first and (step == last or time.monotonic() - saved > SAVE_SECONDS):
            save_state(folder, learned, optimizer, RunState(recipe, identity, step, time.monotonic() - began))
            saved = time.monotonic()
        on_step(Progress(step, recipe.steps, divergence + error, divergence, error, time.monotonic() - began))


def memory_error(failure: BaseException, recipe: Recipe) -> BaseException:
    """The sentence for a failure for want of memory; any other failure as it is."""
    said = str(failure).lower()
    if isinstance(failure, MemoryError | torch.OutOfMemoryError) or "memory" in said:
        return InputError(
            f"there is not enough memory for {recipe.batch} sequences of {recipe.long_length or recipe.length} tokens; "
            "choose a smaller --length, or a smaller model"
        )
    return failure


@dataclass(frozen=True)
class RunState:
    """What a state file says beside its tensors."""

    recipe: Recipe
    identity: str
    step: int
    seconds: float


def read_state(folder: Path) -> RunState | None:
    """The state in `folder`, without its tensors; None where there is none.

    Raises:
        InputError: it is damaged.
    """
    path = folder / STATE_FILE
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            content = json.loads((file.metadata() or {})["run"])
        return RunState(Recipe(**content["recipe"]), content["identity"], content["step"], content["seconds"])
    except Exception as error:  # safetensors raises its own
        raise InputError(f"{path} is damaged; remove the folder {folder} to start again") from error


def save_state(folder: Path, learned: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, run: RunState) -> None:
    """Write the state; whole or not at all, as a kill may come at any time.

    Raises:
        InputError: it cannot be written, as on a full disk.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in learned.items():
        tensors[f"weights.{name}"] = parameter.detach().cpu().contiguous()
        for moment in ("exp_avg", "exp_avg_sq"):
            if moment in optimizer.state[parameter]:
                tensors[f"{moment}.{name}"] = optimizer.state[parameter][moment].cpu().contiguous()
    partial = folder / f"{STATE_FILE}.partial"
    try:
        save_file(tensors, partial, {"run": json.dumps(asdict(run))})
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(folder / STATE_FILE)
    except Exception as error:  # safetensors raises its own
        partial.unlink(missing_ok=True)
        raise InputError(
            f"the state of the run cannot be written to {folder}: {error}; make room, then resume"
        ) from error


@torch.no_grad()
def load_state(folder: Path, learned: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, step: int) -> None:
    """Put the tensors of a state where they belong."""
    with safe_open(folder / STATE_FILE, framework="pt") as file:
        for name, parameter in learned.items():
            parameter.copy_(file.get_tensor(f"weights.{name}"))
            if step:
                moments = {
                    kind: file.get_tensor(f"{kind}.{name}").to(parameter.device) for kind in ("exp_avg", "exp_avg_sq")
                }
                optimizer.state[parameter] = {"step": torch.tensor(float(step)), **moments}
