"""Serving: the engine, its backends, the API frontends, clients and the offline `LLM`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sharp.serving.api.completion import Completion
    from sharp.serving.api.guided import Guided
    from sharp.serving.api.sampling_params import SamplingParams
    from sharp.serving.llm import LLM

__all__ = ["LLM", "Completion", "Guided", "SamplingParams"]

MODULES = {
    "LLM": "llm",
    "Completion": "api.completion",
    "Guided": "api.guided",
    "SamplingParams": "api.sampling_params",
}


def __getattr__(name: str) -> Any:
    # Imports are lazy, because clients and the help of commands need no engine.
    if name in MODULES:
        return getattr(import_module(f"{__name__}.{MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
