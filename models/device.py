"""The choice of the device that a model runs on."""

import torch

from sharp.core.errors import InputError


def choose_device(name: str) -> torch.device:
    """Return the device called `name`; `auto` is the GPU if there is one, otherwise the CPU.

    Raises:
        InputError: a GPU is requested, but PyTorch finds none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("--device is cuda, but PyTorch finds no GPU; choose cpu")
    return torch.device("cuda" if name == "auto" and torch.cuda.is_available() else name.replace("auto", "cpu"))
