"""What a training step learns from: a batch of inputs and targets, and the loss between targets and outputs."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

IGNORED = -100  # the target of a position that is not predicted; in targets that are numbers it is nan


@dataclass(frozen=True)
class Batch:
    """Inputs, in the order of the model's arguments, and what the model should say to them.

    Targets are int64 classes (the outputs have one more axis, of logits) or float numbers (the outputs have one more
    axis, of size 1).
    """

    inputs: tuple[Tensor, ...]
    targets: Tensor

    def to(self, device: torch.device) -> "Batch":
        """The same batch on `device`."""
        return Batch(tuple(tensor.to(device) for tensor in self.inputs), self.targets.to(device))


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean over the predicted positions of the cross entropy in nats or, for numbers, of the squared error."""
    if targets.is_floating_point():
        error = outputs.float().squeeze(-1) - targets
        return error[~targets.isnan()].square().mean()
    return functional.cross_entropy(outputs.float().flatten(0, -2), targets.flatten(), ignore_index=IGNORED)
