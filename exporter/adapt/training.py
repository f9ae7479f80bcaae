"""The distillation, which is deterministic, saved regularly, and resumed to the same weights."""

import math
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from sharp.core.errors import InputError, SharpError
from sharp.exporter.adapt.processes import ALONE, Processes
from sharp.exporter.adapt.recipe import DTYPES, Recipe, alpha_at, batch_at
from sharp.exporter.adapt.state import RunState, load_state, read_state, save_state
from sharp.exporter.adapt.student import Student
from sharp.models.adapted_model import attention_norms

LOGITS_ROWS = 128  # tokens whose logits exist at once; a whole sequence may need a gigabyte
MOST_LOGITS = 2**25
SAVE_SECONDS = 30.0
CHECKPOINTED_LENGTH = 2048  # sequences from this length recompute activations in the backward pass
PROBE_STEPS, PROBE_SECONDS = 8, 1.0  # at most, to measure the speed


@dataclass(frozen=True)
class Progress:
    """The state of training after a step.

    `step` of `steps` steps are done, which took `seconds`, those before a resumption included. `loss` is `divergence` +
    the relative squared error of the hidden states, both means over the step's tokens.
    """

    step: int
    steps: int
    loss: float
    divergence: float  # KL in nats per token
    seconds: float


def backward(student: Student, input_ids: Tensor, share: float, dtype: torch.dtype) -> tuple[float, float]:
    """Add the gradients of one micro-batch int64 [sequences, tokens], times its `share` of the batch.

    `dtype` is that of matrix products.

    Returns:
        KL(teacher || student) in nats per token, and the relative squared error of the hidden states, mean of layers.
    """
    with torch.autocast(input_ids.device.type, dtype, enabled=dtype != torch.float32):
        with student.teacher():
            right, right_layers = student.hidden(input_ids, every_layer=True)
        found, layers = student.hidden(input_ids, every_layer=True)
        errors = [
            (states.float() - target.float()).square().mean() / target.float().square().mean()
            for states, target in zip(layers, right_layers, strict=True)
        ]
        hidden_error = torch.stack(errors).mean()
        rows, right_rows = found.flatten(0, 1), right.flatten(0, 1)
        divergence = found.new_zeros((), dtype=torch.float32)
        for part, target in zip(rows.split(LOGITS_ROWS), right_rows.split(LOGITS_ROWS), strict=True):
            # The logits of a short sequence fit into memory and need no checkpointing.
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
    """Return the sum over tokens of KL(teacher || student), in nats.

    `rows` are the student's final hidden states [tokens, hidden_size], and `right_rows` the teacher's.
    """
    with torch.no_grad():
        right = functional.log_softmax(student.decoder.logits(right_rows).float(), -1)
    found = functional.log_softmax(student.decoder.logits(rows).float(), -1)
    return functional.kl_div(found, right, log_target=True, reduction="sum")


def seconds_per_token(student: Student, tokens: Tensor, batch: int, length: int, dtype: str) -> float:
    """Measure the seconds of training per token, for steps of `batch` sequences of `length` tokens.

    The first step is not counted, because it is slower. The result is the mean of the others: of one step that takes
    over a second, of several that are shorter. `dtype` is a key of `DTYPES`. No parameter is changed; gradients are
    discarded.
    """
    recipe = Recipe(PROBE_STEPS, length, batch, dtype=dtype)
    seconds: list[float] = []
    while len(seconds) < 2 or (len(seconds) < PROBE_STEPS and sum(seconds[1:]) < PROBE_SECONDS):
        began = time.monotonic()
        with on_the_path(student, 0.0):  # the share at which a step takes longest
            train_step(student, batch_at(recipe, tokens, len(seconds)), DTYPES[dtype])
        seconds.append(time.monotonic() - began)
        for parameter in student.learned().values():
            parameter.grad = None
    return fmean(seconds[1:]) / (batch * length)


def train_step(student: Student, input_ids: Tensor, dtype: torch.dtype = torch.float32) -> tuple[float, float]:
    """Add the gradients of a batch int64 [sequences, tokens], a few sequences at a time; no optimizer step is taken.

    Returns:
        KL(teacher || student) in nats per token, and the relative squared error of the hidden states, means of the
        batch.
    """
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
    """Switch gradient checkpointing of all layers.

    Transformers checkpoints layers in training mode only. The mode is set for the layer alone and not for its modules,
    so dropout stays off.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if checkpointed and layers and not getattr(layers[0], "gradient_checkpointing", False):
        transformer: Any = model
        transformer.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in layers:
        layer.training = checkpointed


@contextmanager
def on_the_path(student: Student, share: float) -> Iterator[None]:
    """Give the student, inside the context, the norm of a step before which this `share` (0 to 1) of the run lies.

    Only entmax has a path from softmax; other norms stay as they are.
    """
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
    """Train `student` in place for the recipe's steps, or continue the run whose state is in `folder`.

    `tokens` is int64 [n]. `identity` is written with the state; the caller has compared it with that of an earlier
    state (`state_of`). `on_step` is called after every step. All `processes` call this function with the same
    arguments, and the first saves the state. `stop_after` ends the run after that step, as if it had been killed once
    the step was saved.

    Raises:
        InputError: there is not enough memory, or the state is damaged or cannot be written.
        SharpError: the loss is no longer finite.
    """
    learned = student.learned()
    adapters = {name for name in learned if "lora_" in name}

    def losses_of(step: int) -> tuple[float, float]:
        """Add the gradients of a step's batch, and return KL and the error of hidden states, as `train_step` does."""
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
    """Minimize a loss over the parameters `learned`, in place, for the recipe's steps, or continue the run in `folder`.

    Args:
        learned: the trained parameters by name.
        adapters: names of parameters with the recipe's rate for adapters; all others have the rate for norms.
        recipe: the steps and rates.
        losses_of: adds the gradients of a step (from 0) to the parameters and returns divergence and hidden error,
            whose sum is the loss.
        on_step: called after every step.
        folder: where the state is saved; None: nowhere.
        identity: identifies the run in its state. It is not compared with that of an earlier state (see `state_of`).
        stop_after: end the run after this step, as if it had been killed.
        processes: the processes that train together; the first saves the state.

    Raises:
        InputError: there is not enough memory, or the state is damaged or cannot be written.
        SharpError: the loss is no longer finite.
    """
    norms = [parameter for name, parameter in learned.items() if name not in adapters]
    groups = [
        {"params": [parameter for name, parameter in learned.items() if name in adapters], "lr": recipe.adapter_rate},
        {"params": norms, "lr": recipe.norm_rate},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.0)
    device = next(iter(learned.values())).device
    rates = [group["lr"] for group in optimizer.param_groups]
    state = None if folder is None else read_state(folder)
    processes.wait()  # the first process writes the state only after all have read it
    step, seconds = (0, 0.0) if state is None else (state.step, state.seconds)
    began, saved = time.monotonic() - seconds, time.monotonic()

    def save() -> None:
        """Save the state of the training, in the first process only and if there is a folder."""
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
        processes.average([losses, *(parameter.grad for parameter in learned.values() if parameter.grad is not None)])
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
        on_step(Progress(step, recipe.steps, divergence + error, divergence, time.monotonic() - began))


def memory_error(failure: BaseException, recipe: Recipe) -> BaseException:
    """Return an InputError for a failure for lack of memory; return any other failure itself.

    A failure is for lack of memory by its class, or if its message has the word "memory".
    """
    said = str(failure).lower()
    if isinstance(failure, MemoryError | torch.OutOfMemoryError) or "memory" in said:
        return InputError(
            f"there is not enough memory for {recipe.batch} sequences of {recipe.long_length or recipe.length} tokens; "
            "choose a smaller --length, or a smaller model"
        )
    return failure
