"""Exports in one process: what many have in common is made once.

The fixtures are of a module, so that tests elsewhere meet torch's own functions; what they keep is the process's.
"""

import copy
import functools
import hashlib
import io
import pickle
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir
import pytest
import torch
from torch.fx import _lazy_graph_module
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.sym_node import SymNode
from torch.onnx._internal.exporter._registration import ONNXRegistry

LARGEST = 16 << 20  # bytes of a module that is kept
ARITHMETIC = [f"_{name}" for name in ("add", "sub", "mul", "int_floordiv", "mod", "sym_max", "sym_min")] + [
    f"_{name}" for name in ("eq", "ne", "lt", "le", "gt", "ge")
]
_registry = functools.cache(ONNXRegistry.from_torchlib)
_materialize_operators = functools.cache(torch._export.utils._materialize_cpp_cia_ops)
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
def quick_tracing() -> Iterator[None]:
    """What torch does for a trace but throws away, or does again: a quarter of a trace's time.

    It makes Python code of every graph that a pass leaves, compares the sizes of every new tensor with each other as
    expressions, and makes a table of all operators twice. Commands that tests start have torch as it is.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_lazy_graph_module, "_use_lazy_graph_module_flag", True)
        patch.setattr(torch._export.utils, "_materialize_cpp_cia_ops", _materialize_operators)
        for name in ARITHMETIC:
            patch.setattr(SymNode, name, _computed_once(name))
        yield


def _computed_once(name: str) -> Callable[[SymNode, SymNode], Any]:
    """The method of symbolic sizes, which computes the same expression once per trace."""
    compute = getattr(SymNode, name)

    def computed(self: SymNode, other: SymNode) -> Any:
        sizes = self.shape_env
        if sizes is None or other.__class__ is not SymNode or get_proxy_mode() is not None:
            return compute(self, other)
        known = sizes.__dict__.setdefault("_computed", {})
        key = (name, self._expr, other._expr, self.pytype, other.pytype, sizes._replacements_version_counter)
        if key not in known:
            known[key] = compute(self, other)
        # Another object: a graph knows where a size comes from by the object.
        again = object.__new__(SymNode)
        again.__dict__.update(known[key].__dict__)
        return again

    return computed


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
