"""PyTorch in float64: how far a model's own rounding in float32 carries."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


class _Float64Mode(TorchFunctionMode):
    """Whatever asks for float32 gets float64: norms and softmaxes of transformers compute in float32 by name."""

    def __torch_function__(
        self, function: Any, _types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        wide = tuple(_wider(argument) for argument in arguments)
        return function(*wide, **{name: _wider(argument) for name, argument in (named or {}).items()})


def _wider(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument


@contextmanager
def in_float64(model: nn.Module) -> Iterator[None]:
    """Inside, `model` computes in float64 what it computes in float32 outside, with the very same float32 weights.

    The weights take twice their memory meanwhile; afterwards they are the same bits as before.
    """
    model.double()
    try:
        with _Float64Mode():
            yield
    finally:
        model.float()
