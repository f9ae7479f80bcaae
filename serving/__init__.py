"""Serving: the engine, its backends, the gRPC server and the offline `LLM`."""

from sharp.serving.completion import Completion
from sharp.serving.guided import Guided
from sharp.serving.llm import LLM
from sharp.serving.sampling_params import SamplingParams

__all__ = ["LLM", "Completion", "Guided", "SamplingParams"]
