"""Speculative decoding: how many draft tokens a step may have, and which of them are accepted."""

from sharp.plugins.manifest import Manifest
from sharp.plugins.sampling import NO_TOKEN
from sharp.serving.backends import Backend
from sharp.serving.config import EngineConfig
from sharp.serving.engine.scheduler import Chunk

SPECULATIVE_TOKENS = 8


def speculative_tokens(config: EngineConfig, backend: Backend, manifest: Manifest) -> int:
    """Most draft tokens of a step.

    The gain on a GPU is not measured, so there it is off unless set. A block of an int8 cache has one scale for all its
    tokens: a draft token would round those before it anew.
    """
    if config.speculative_tokens is not None:
        return config.speculative_tokens
    return SPECULATIVE_TOKENS if backend.device == "cpu" and manifest.cache.dtype != "int8" else 0


def accepted_tokens(chunk: Chunk, sampled: list[int]) -> list[int]:
    """The tokens sampled after a chunk and its draft, up to the first that differs from the draft or ends the text."""
    for position, (token, draft) in enumerate(zip(sampled, chunk.draft, strict=False)):
        if token != draft or token in chunk.sequence.stop.token_ids:
            return sampled[: position + 1]
        if sampled[position + 1] == NO_TOKEN:  # the next step, without a draft, finds out why
            return sampled[: position + 1]
    return sampled
