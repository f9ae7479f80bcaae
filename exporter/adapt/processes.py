"""The processes of torchrun. Each has a device and a share of every batch, and all have the same weights."""

import atexit
import os
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor

from sharp.models.device import choose_device

LONGEST_WAIT = timedelta(hours=6)  # that other processes wait for the first, which measures and writes alone


@dataclass(frozen=True)
class Processes:
    """The number of processes that train together, and the index of this process."""

    count: int = 1
    index: int = 0

    @property
    def first(self) -> bool:
        """Whether this process measures, writes and reports."""
        return self.index == 0

    def share(self, batch: Tensor) -> Tensor:
        """Return this process's sequences of a batch [sequences, ...], a multiple of the number of processes."""
        return batch[self.index :: self.count]

    @torch.no_grad()
    def average(self, tensors: list[Tensor]) -> None:
        """Replace each tensor by its mean over the processes, in place; all processes must call this together."""
        if self.count == 1 or not tensors:
            return
        from accelerate.utils import reduce

        flat = reduce(torch.cat([tensor.flatten() for tensor in tensors]), "mean")
        for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(mean.view_as(tensor))

    def of_first(self, value: float) -> float:
        """Return the value that the first process has; all processes must call this together."""
        if self.count == 1:
            return value
        from accelerate import PartialState
        from accelerate.utils import broadcast

        found: Tensor = broadcast(torch.tensor(value, dtype=torch.float64, device=PartialState().device))
        return found.item()

    def wait(self) -> None:
        """Wait until every process has reached this call; with one process, return at once."""
        if self.count > 1:
            from accelerate import PartialState

            PartialState().wait_for_everyone()


ALONE = Processes()


def join(device: str) -> tuple[Processes, torch.device]:
    """Join the processes that torchrun or `accelerate launch` has started, if any.

    Returns:
        The processes, and the device of this process. `device` is "auto", "cpu" or "cuda".

    Raises:
        InputError: a GPU is requested, but PyTorch finds none.
    """
    chosen = choose_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return ALONE, chosen
    from accelerate import PartialState

    state = PartialState(cpu=chosen.type == "cpu", timeout=LONGEST_WAIT)
    atexit.register(_leave)  # threads of the connection may abort a process that ends while connected
    return Processes(state.num_processes, state.process_index), state.device


def _leave() -> None:
    """Leave the process group of torch.distributed, if this process is in one."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
