"""`--dtype float16|bfloat16`: a module with its weights in half precision, as long as it is lowered and written."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from sharp.models.normalizers import SsaParameters
from sharp.models.query_scale import QueryScale

# The op takes the parameters of a norm in float32.
FLOAT32_MODULES = (SsaParameters, QueryScale)


@contextmanager
def weights_as(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside, the parameters of `module` are of `dtype`; afterwards they are what they were.

    Those of norms stay float32, and so do buffers: the angles of RoPE would be wrong in half precision.
    """
    kept = {
        id(parameter) for one in module.modules() if isinstance(one, FLOAT32_MODULES) for parameter in one.parameters()
    }
    changed = [
        parameter
        for parameter in module.parameters()
        if parameter.is_floating_point() and parameter.dtype != dtype and id(parameter) not in kept
    ]
    before = [parameter.data for parameter in changed]
    try:
        for parameter in changed:
            parameter.data = parameter.data.to(dtype)
        yield
    finally:
        for parameter, data in zip(changed, before, strict=True):
            parameter.data = data
