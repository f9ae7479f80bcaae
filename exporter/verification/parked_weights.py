"""The parking of a large model's weights on disk, while ONNX Runtime has its own copy in memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

LEAST_BYTES = 2**30  # for smaller models, writing the weights takes longer than the memory is worth
FILE = "parked.safetensors"


@contextmanager
def parked(model: nn.Module, folder: Path) -> Iterator[bool]:
    """Take the weights of a model of `LEAST_BYTES` or more out of memory inside the context.

    Afterwards the weights have the same bits as before and are mapped from a file. The file is in `folder` inside the
    context and takes as much disk as the weights.

    Yields:
        Whether the model is that large.

    Raises:
        OSError: the file cannot be written.
    """
    tensors = {str(number): tensor for number, tensor in enumerate(chain(model.parameters(), model.buffers()))}
    if sum(tensor.nbytes for tensor in tensors.values()) < LEAST_BYTES:
        yield False
        return
    path = folder / FILE
    try:
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    for tensor in tensors.values():
        tensor.data = torch.empty(0, dtype=tensor.dtype)
    try:
        yield True
    finally:
        with safe_open(path, framework="pt") as file:
            for name, tensor in tensors.items():
                tensor.data = file.get_tensor(name)
        path.unlink()  # mapped tensors stay valid
