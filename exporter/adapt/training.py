"""The distillation: deterministic, saved as it goes, and resumed to the same weights."""

import math
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from sharp.exporter.adapt.processes import ALONE, Processes
from sharp.exporter.adapt.recipe import DTYPES, Recipe, alpha_at, batch_at
from sharp.exporter.adapt.state import RunState, load_state, read_state, save_state
from sharp.exporter.adapt.student import Student
from sharp.models.adapted_model import attention_norms
from sharp.plugins.errors import InputError, SharpError

LOGITS_ROWS = 128  # tokens whose logits exist at once: of a large vocabulary, a gigabyte for a whole sequence
MOST_LOGITS = 2**25
SAVE_SECONDS = 30.0
CHECKPOINTED_LENGTH = 2048  # from here on activations are computed again in the backward pass
PROBE_STEPS = 2


@dataclass(frozen=True)
class Progress:
    """What is known after a step."""

    step: int
    steps: int
    loss: float
    divergence: float  # KL in nats per token
    hidden_error: float
    seconds: float


def backward(student: Student, input_ids: Tensor, share: float, dtype: torch.dtype) -> tuple[float, float]:
    """Add the gradients of one micro-batch; (KL per token, relative squared error of the hidden states)."""
    with torch.autocast(input_ids.device.type, dtype, enabled=dtype != torch.float32):
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


def seconds_per_token(student: Student, tokens: Tensor, batch: int, length: int, dtype: str) -> float:
    """Time of a token of training; the gradients are thrown away."""
    recipe = Recipe(PROBE_STEPS, length, batch, dtype=dtype)
    seconds = []
    for step in range(PROBE_STEPS):
        began = time.monotonic()
        with on_the_path(student, 0.0):  # where a step takes longest
            train_step(student, batch_at(recipe, tokens, step), DTYPES[dtype])
        seconds.append(time.monotonic() - began)
        for parameter in student.learned().values():
            parameter.grad = None
    return min(seconds) / (batch * length)


def train_step(student: Student, input_ids: Tensor, dtype: torch.dtype = torch.float32) -> tuple[float, float]:
    """The gradients of a batch, a few sequences at a time; the mean of `backward`'s numbers."""
    device = next(student.model.parameters()).device
    length = input_ids.shape[1]
    at_once = max(1, (8192 if device.type == "cuda" else 512) // length)
    _checkpoint_layers(student.model, length >= CHECKPOINTED_LENGTH)
    divergence, error = 0.0, 0.0
    for part in input_ids.split(at_once):
        share = len(part) / len(input_ids)
        found = backward(student, part.to(device), share, dtype)
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


@contextmanager
def on_the_path(student: Student, share: float) -> Iterator[None]:
    """The student with the norm of a step before which this `share` of the run lies; some norms have no path."""
    target = student.described
    present = target
    if target.scheme.normalizer == "entmax":
        present = replace(target, alpha=alpha_at(share, target.alpha))
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
    adapters = {name for name in learned if "lora_" in name}

    def losses_of(step: int) -> tuple[float, float]:
        with on_the_path(student, step / recipe.steps if recipe.path else 1.0):
            return train_step(student, processes.share(batch_at(recipe, tokens, step)), DTYPES[recipe.dtype])

    descend(learned, adapters, recipe, losses_of, on_step, folder, identity, stop_after, processes)


def descend(
    learned: dict[str, nn.Parameter],
    adapters: Collection[str],
    recipe: Recipe,
    losses_of: Callable[[int], tuple[float, float]],
    on_step: Callable[[Progress], None],
    folder: Path | None,
    identity: str,
    stop_after: int | None = None,
    processes: Processes = ALONE,
) -> None:
    """Minimize what `losses_of` a step returns the parts of, after it has added the gradients of `learned`.

    The parameters named in `adapters` have the recipe's rate for adapters, the others that for norms. The state is kept
    in `folder`, where there is one. Else as `train`.
    """
    norms = [one for name, one in learned.items() if name not in adapters]
    groups = [
        {"params": [one for name, one in learned.items() if name in adapters], "lr": recipe.adapter_rate},
        {"params": norms, "lr": recipe.norm_rate},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.0)
    device = next(iter(learned.values())).device
    rates = [group["lr"] for group in optimizer.param_groups]
    state = None if folder is None else read_state(folder)
    processes.wait()  # the first writes when all have read
    step, seconds = (0, 0.0) if state is None else (state.step, state.seconds)
    began, saved = time.monotonic() - seconds, time.monotonic()

    def save() -> None:
        if folder is not None and processes.first:
            save_state(folder, learned, optimizer, RunState(recipe, identity, step, time.monotonic() - began))

    if folder is not None and state is not None:
        load_state(folder, learned, optimizer, step)
    else:
        save()
    last = recipe.steps if stop_after is None else min(stop_after, recipe.steps)
    while step < last:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * recipe.rate_at(step)
        try:
            losses = torch.tensor(losses_of(step), device=device)
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
        if step == last or time.monotonic() - saved > SAVE_SECONDS:
            save()
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
