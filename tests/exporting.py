"""`one_registry`: what many exports in one process have in common is made once."""

import copy
import functools
from collections.abc import Iterator
from typing import Any

import pytest
from torch.onnx._internal.exporter._registration import ONNXRegistry


@pytest.fixture(scope="session", autouse=True)
def one_registry() -> Iterator[None]:
    """torch.onnx makes its table of translations anew for every export: a third of the time of a tiny model's."""
    made = functools.cache(ONNXRegistry.from_torchlib)

    def copied(*arguments: Any, **options: Any) -> ONNXRegistry:
        registry = copy.copy(made(*arguments, **options))
        registry.functions = {name: list(found) for name, found in registry.functions.items()}
        return registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(copied))
        yield
