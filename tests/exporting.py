"""Fixtures that make repeated exports in one process faster by caching what the exports have in common.

The fixtures patch torch for one test module, so that tests in other modules meet torch's own functions. The caches live
as long as the process.
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

LARGEST = 16 << 20  # most bytes of weights of a module whose trace is kept
ARITHMETIC = [f"_{name}" for name in ("add", "sub", "mul", "int_floordiv", "mod", "sym_max", "sym_min")] + [
    f"_{name}" for name in ("eq", "ne", "lt", "le", "gt", "ge")
]
_registry = functools.cache(ONNXRegistry.from_torchlib)
_materialize_operators = functools.cache(torch._export.utils._materialize_cpp_cia_ops)
_kept: dict[bytes, onnx_ir.Model] = {}


@pytest.fixture(scope="module", autouse=True)
def one_registry() -> Iterator[None]:
    """Cache torch.onnx's table of translations, which takes a third of the time of a tiny model's export.

    torch.onnx makes the table anew for every export.
    """

    def copied(*arguments: Any, **options: Any) -> ONNXRegistry:
        registry = copy.copy(_registry(*arguments, **options))
        registry.functions = {name: list(found) for name, found in registry.functions.items()}
        return registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(copied))
        yield


@pytest.fixture(scope="module", autouse=True)
def quick_tracing() -> Iterator[None]:
    """Skip work of torch that a trace does not need, or that was done before: a quarter of the time of a trace.

    torch makes Python code of every graph that a pass leaves, compares the sizes of every new tensor with each other as
    expressions, and makes a table of all operators twice. Commands that tests start run torch unchanged.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_lazy_graph_module, "_use_lazy_graph_module_flag", True)
        patch.setattr(torch._export.utils, "_materialize_cpp_cia_ops", _materialize_operators)
        for name in ARITHMETIC:
            patch.setattr(SymNode, name, _computed_once(name))
        yield


def _computed_once(name: str) -> Callable[[SymNode, SymNode], Any]:
    """Return the method `name` of symbolic sizes, changed to compute each expression once per trace."""
    compute = getattr(SymNode, name)

    def computed(self: SymNode, other: SymNode) -> Any:
        sizes = self.shape_env
        if sizes is None or other.__class__ is not SymNode or get_proxy_mode() is not None:
            return compute(self, other)
        known = sizes.__dict__.setdefault("_computed", {})
        key = (name, self._expr, other._expr, self.pytype, other.pytype, sizes._replacements_version_counter)
        if key not in known:
            known[key] = compute(self, other)
        # Return another object with the same content, because a graph finds the origin of a size by the object.
        again = object.__new__(SymNode)
        again.__dict__.update(known[key].__dict__)
        return again

    return computed


@pytest.fixture(scope="module", autouse=True)
def one_trace() -> Iterator[None]:
    """Trace each module once, however many tests export it: 90 % of the time of a tiny model's export.

    Two modules are the same if they pickle to the same bytes, weights and configuration included, and are called with
    the same arguments. A module that cannot be pickled is traced every time.
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
    """A pickler that writes tensors by their content, because torch's own pickles of tensors contain addresses."""

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
    except Exception:  # an object that cannot be pickled may raise any exception
        return None
    return hashlib.sha256(file.getvalue()).digest()


def _detached(model: onnx_ir.Model) -> onnx_ir.Model:
    """Copy the weights of `model`, so that it no longer shares them with the module, and return `model`."""
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        assert tensor is not None
        value.const_value = onnx_ir.Tensor(np.array(tensor.numpy()), dtype=tensor.dtype, name=name)
    return model
