"""Exports in one process: what many have in common is made once.

The fixtures are of a module, so that tests elsewhere meet torch's own functions; what they keep is the process's.
"""

import copy
import functools
import hashlib
import io
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir
import pytest
import torch
from torch.onnx._internal.exporter._registration import ONNXRegistry

LARGEST = 16 << 20  # bytes of a module that is kept
_registry = functools.cache(ONNXRegistry.from_torchlib)
_kept: dict[bytes, onnx_ir.Model] = {}


@pytest.fixture(scope="module", autouse=True)
def one_registry() -> Iterator[None]:
    """torch.onnx makes its table of translations anew for every export: a third of the time of a tiny model's."""

    def copied(*arguments: Any, **options: Any) -> ONNXRegistry:
        registry = copy.copy(_registry(*arguments, **options))
        registry.functions = {name: list(found) for name, found in registry.functions.items()}
        return registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(copied))
        yield


@pytest.fixture(scope="module", autouse=True)
def one_trace() -> Iterator[None]:
    """A module is traced once, however many tests export it: that is nine tenths of the time of a tiny model's export.

    It is the same module if it pickles to the same bytes, weights and configuration included, and is called with the
    same arguments. One that cannot be pickled is traced every time.
    """
    export = torch.onnx.export

    def traced(module: torch.nn.Module, arguments: tuple[Any, ...], **options: Any) -> Any:
        same = {name: value for name, value in options.items() if name != "custom_translation_table"}
        key = _digest((module, arguments, same, torch.get_default_dtype()))
        if key is None:
            return export(module, arguments, **options)
        if key not in _kept:
            _kept[key] = _detached(export(module, arguments, **options).model)
        return SimpleNamespace(model=_kept[key].clone())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.onnx, "export", traced)
        yield


class _Pickler(pickle.Pickler):
    """Pickles tensors by their content: their own pickles have addresses."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.bytes = 0

    def reducer_override(self, value: object) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        self.bytes += value.nbytes
        if self.bytes > LARGEST:
            raise pickle.PicklingError
        content = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        described = (type(value), str(value.dtype), tuple(value.shape), value.stride(), value.requires_grad)
        return tuple, ((*described, hashlib.sha256(content).digest()),)


def _digest(value: object) -> bytes | None:
    file = io.BytesIO()
    try:
        _Pickler(file).dump(value)
    except Exception:  # whatever an object that cannot be pickled raises
        return None
    return hashlib.sha256(file.getvalue()).digest()


def _detached(model: onnx_ir.Model) -> onnx_ir.Model:
    """`model`, whose weights are no longer the module's."""
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        assert tensor is not None
        value.const_value = onnx_ir.Tensor(np.array(tensor.numpy()), dtype=tensor.dtype, name=name)
    return model
