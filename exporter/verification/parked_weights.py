"""A large model's weights on disk while ONNX Runtime has its own copy in memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

LEAST_BYTES = 2**30  # below, writing them takes longer than the memory is worth
FILE = "parked.safetensors"


@contextmanager
def parked(model: nn.Module, folder: Path) -> Iterator[bool]:
    """Inside, a model of `LEAST_BYTES` or more holds no weights; afterwards they are the same bits, mapped from a file.

    Gives whether the model is that large.

    The file is in `folder` while the block runs and takes as much disk as the weights.

    Raises:
        OSError: it cannot be written.
    """
    tensors = {str(number): one for number, one in enumerate(chain(model.parameters(), model.buffers()))}
    if sum(one.nbytes for one in tensors.values()) < LEAST_BYTES:
        yield False
        return
    path = folder / FILE
    try:
        save_file({name: one.detach().contiguous() for name, one in tensors.items()}, path)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    for one in tensors.values():
        one.data = torch.empty(0, dtype=one.dtype)
    try:
        yield True
    finally:
        with safe_open(path, framework="pt") as file:
            for name, one in tensors.items():
                one.data = file.get_tensor(name)
        path.unlink()  # what is mapped stays
