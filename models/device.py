"""Where a model runs."""

import torch

from sharp.plugins.errors import InputError


def choose_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one.

    Raises:
        InputError: a GPU is requested and there is none that PyTorch can use.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("--device is cuda, but PyTorch finds no GPU; choose cpu")
    return torch.device("cuda" if name == "auto" and torch.cuda.is_available() else name.replace("auto", "cpu"))
