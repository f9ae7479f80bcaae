"""Serving: the engine, its backends, the API frontends, clients and the offline `LLM`."""

from sharp.serving.api.completion import Completion
from sharp.serving.api.guided import Guided
from sharp.serving.api.sampling_params import SamplingParams
from sharp.serving.llm import LLM

__all__ = ["LLM", "Completion", "Guided", "SamplingParams"]
