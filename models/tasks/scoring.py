"""How well a model does a task: one score per sample, and their mean with its standard error."""

import os
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sharp.models.objective import IGNORED, Batch
from sharp.models.tasks.task import Metric, Sampler
from sharp.plugins.errors import InputError

POSITIONS_PER_BATCH = 2**17
WEIGHTS_PER_RUN = 2**25  # attention weights that one forward pass holds per layer: 128 MiB in float32
SKIPPED_POINTS = 2  # no line is known before two points (SSA Eq. 2 begins with k = 3)


@dataclass(frozen=True)
class Score:
    """Mean and standard error over samples."""

    mean: float
    standard_error: float


class Scorable(Protocol):
    """A model of ours, or one that was exported: from a batch's inputs to outputs, on the CPU if it is no module.

    `config.q_heads`, if it has that, is the number of heads whose weights one layer holds in memory.
    """

    @property
    def config(self) -> Any:
        """What the model is made from."""
        ...

    def __call__(self, *inputs: Tensor) -> Tensor:
        """The outputs for a batch."""
        ...


@torch.no_grad()
def score(model: Scorable, sampler: Sampler, metric: Metric, length: int, samples: int, seed: int = 0) -> Score:
    """The score of `model` on `samples` samples of `length`, on the device that the model is on.

    Samples depend on the sampler, the length and the seed alone, so that models can be compared in pairs. Answers are
    predicted with the right answer's beginning given, which for an exact match is the same as generating greedily.

    Raises:
        InputError: there are no samples of that length, or attention over it does not fit into memory.
    """
    tokens = sampler.tokens(length)
    heads = getattr(model.config, "q_heads", 0)  # the set model has one query, so one row of weights
    per_run = max(1, WEIGHTS_PER_RUN // (heads * tokens * tokens)) if heads else samples
    device = next(model.eval().parameters()).device if isinstance(model, nn.Module) else torch.device("cpu")
    check_memory(heads * tokens * tokens, length, device)
    generator = torch.Generator().manual_seed(seed)
    found: list[Tensor] = []
    while (done := sum(map(len, found))) < samples:
        batch = sampler.sample(min(max(1, POSITIONS_PER_BATCH // tokens), samples - done), length, generator).to(device)
        inputs = zip(*(tensor.split(per_run) for tensor in batch.inputs), strict=True)
        outputs = torch.cat([model(*part) for part in inputs])
        found.append(sample_scores(metric, outputs, batch).cpu())
    scores = torch.cat(found).double()
    spread = scores.std().item() if samples > 1 else 0.0
    return Score(scores.mean().item(), spread / samples**0.5)


def sample_scores(metric: Metric, outputs: Tensor, batch: Batch) -> Tensor:
    """The score of every sample, float32 [samples]."""
    targets = batch.targets.reshape(len(batch.targets), -1)  # the set model's have one axis only
    if metric == "squared_error":
        error = outputs.float().reshape(targets.shape) - targets
        scored = ~targets[0].isnan()  # the same positions in every sample
        points = error[:, scored]
        return points[:, SKIPPED_POINTS:].square().mean(1) if points.shape[1] > SKIPPED_POINTS else points[:, 0] ** 2
    right = outputs.argmax(-1).reshape(targets.shape) == targets
    scored = targets != IGNORED
    if metric == "exact_match":
        return (right | ~scored).all(1).float()
    if metric == "final_accuracy":
        return right[:, -1].float()
    return right.sum(1) / scored.sum(1)


def memory_of(device: torch.device) -> int:
    """Bytes of memory that the device has."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_memory(weights: int, length: int, device: torch.device) -> None:
    """Check that the attention weights of one layer, so many numbers, fit into memory.

    Raises:
        InputError: they do not.
    """
    needed = 4 * 5 * weights  # float32; logits, mask, weights and what the normalizer keeps
    there = memory_of(device)
    if needed > there:
        raise InputError(
            f"length {length} needs about {needed / 2**30:.0f} GiB for one sample, there are {there / 2**30:.0f}; "
            "choose shorter lengths, or export the model and run it with Sharp's kernels"
        )
