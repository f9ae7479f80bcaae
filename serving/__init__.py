"""Serving: the engine, its backends, the gRPC server and the offline `LLM`."""

from sharp.serving.llm import LLM, Completion
from sharp.serving.sampling_params import SamplingParams

__all__ = ["LLM", "Completion", "SamplingParams"]
