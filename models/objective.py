"""The objective of training: batches of inputs and targets, and the loss between targets and outputs."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

IGNORED = -100  # the target of a position that is not predicted; float targets have nan there


@dataclass(frozen=True)
class TrainingBatch:
    """Inputs, in the order of the model's arguments, and targets.

    Targets are int64 classes, for which outputs have one more axis of logits, or float numbers, for which outputs have
    one more axis of size 1.
    """

    inputs: tuple[Tensor, ...]
    targets: Tensor

    def to(self, device: torch.device) -> "TrainingBatch":
        """Return a copy of the batch on `device`."""
        return TrainingBatch(tuple(tensor.to(device) for tensor in self.inputs), self.targets.to(device))


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over predicted positions of the cross entropy in nats or, for float targets, of squared errors.

    `outputs` are logits [..., classes] for int64 targets [...], and [..., 1] for float targets [...]. Targets that are
    `IGNORED` (nan) are left out; without any other target, the result is NaN.
    """
    if targets.is_floating_point():
        error = outputs.float().squeeze(-1) - targets
        return error[~targets.isnan()].square().mean()
    return functional.cross_entropy(outputs.float().flatten(0, -2), targets.flatten(), ignore_index=IGNORED)
