"""The processes of torchrun: each has a device and a share of every batch, all have the same weights."""

import atexit
import os
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor

from sharp.models.device import choose_device

LONGEST_WAIT = timedelta(hours=6)  # for the first process, which measures and writes alone


@dataclass(frozen=True)
class Processes:
    """How many train together, and which of them this is."""

    count: int = 1
    index: int = 0

    @property
    def first(self) -> bool:
        """Whether this process measures, writes and reports."""
        return self.index == 0

    def share(self, batch: Tensor) -> Tensor:
        """The sequences of this process; their number is a multiple of the processes'."""
        return batch[self.index :: self.count]

    @torch.no_grad()
    def average(self, tensors: list[Tensor]) -> None:
        """Replace each tensor by its mean over the processes."""
        if self.count == 1 or not tensors:
            return
        from accelerate.utils import reduce

        flat = reduce(torch.cat([one.flatten() for one in tensors]), "mean")
        for one, mean in zip(tensors, flat.split([one.numel() for one in tensors]), strict=True):
            one.copy_(mean.view_as(one))

    def of_first(self, value: float) -> float:
        """The value that the first process has."""
        if self.count == 1:
            return value
        from accelerate import PartialState
        from accelerate.utils import broadcast

        found: Tensor = broadcast(torch.tensor(value, dtype=torch.float64, device=PartialState().device))
        return found.item()

    def wait(self) -> None:
        """Go on when every process is here."""
        if self.count > 1:
            from accelerate import PartialState

            PartialState().wait_for_everyone()


ALONE = Processes()


def join(device: str) -> tuple[Processes, torch.device]:
    """The processes that torchrun or `accelerate launch` has started, and this one's device; else this one alone."""
    chosen = choose_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return ALONE, chosen
    from accelerate import PartialState

    state = PartialState(cpu=chosen.type == "cpu", timeout=LONGEST_WAIT)
    atexit.register(_leave)  # a process that ends while it is connected may be ended by the connection's threads
    return Processes(state.num_processes, state.process_index), state.device


def _leave() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
