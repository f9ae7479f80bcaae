"""Scores of a model on a task: a score for each sample, and the mean with its standard error."""

import os
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sharp.core.errors import InputError
from sharp.models.objective import IGNORED, TrainingBatch
from sharp.models.tasks.task import Metric, Sampler

POSITIONS_PER_BATCH = 2**17
WEIGHTS_PER_RUN = 2**25  # attention weights that one forward pass holds per layer: 128 MiB in float32
SKIPPED_POINTS = 2  # no line is known before two points (SSA Eq. 2 begins with k = 3)


@dataclass(frozen=True)
class Score:
    """The mean score over samples, and its standard error."""

    mean: float
    standard_error: float


class Scorable(Protocol):
    """A model of ours or an exported model, which maps a batch's inputs to outputs; without a module, on the CPU.

    `config.q_heads`, if the configuration has this field, is the number of heads whose weights one layer holds in
    memory.
    """

    @property
    def config(self) -> Any:
        """The configuration of the model."""
        ...

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Return the outputs for the inputs of a batch."""
        ...


@torch.no_grad()
def score(model: Scorable, sampler: Sampler, metric: Metric, length: int, samples: int, seed: int = 0) -> Score:
    """Return the score of `model` on `samples` (at least 1) samples of `length`, computed on the model's device.

    A module is put into evaluation mode. The metrics are described at `sample_scores`; the standard error of one sample
    is 0. Samples depend only on the sampler, the length and the seed, so models can be compared in pairs. Each token of
    the answer is predicted after the right tokens before it, which for an exact match is the same as greedy generation.

    Raises:
        InputError: there are no samples of this length, or attention over them does not fit into memory.
    """
    tokens = sampler.tokens(length)
    heads = getattr(model.config, "q_heads", 0)  # the set model has one query and so only one row of weights
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


def sample_scores(metric: Metric, outputs: Tensor, batch: TrainingBatch) -> Tensor:
    """Return the score of every sample, float32 [samples], from the model's outputs for the batch.

    | metric | score |
    | --- | --- |
    | exact_match | 1 if all targets of the sample are right, else 0 |
    | accuracy | share of the sample's targets that are right |
    | final_accuracy | 1 if the last target is right, else 0 |
    | squared_error | mean squared error of the points but the first two; of the first if there are no others |
    """
    targets = batch.targets.reshape(len(batch.targets), -1)  # targets of the set model have one axis only
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
    """Return the bytes of memory that the device has in all, used or not; of a CPU, the machine's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_memory(weights: int, length: int, device: torch.device) -> None:
    """Check that the attention weights of one layer, `weights` numbers, fit into memory; `length` is named if not.

    Raises:
        InputError: the weights do not fit.
    """
    needed = 4 * 5 * weights  # float32; logits, mask, weights and what the normalizer keeps
    there = memory_of(device)
    if needed > there:
        raise InputError(
            f"length {length} needs about {needed / 2**30:.0f} GiB for one sample, there are {there / 2**30:.0f}; "
            "choose shorter lengths, or export the model and run it with Sharp's kernels"
        )
