"""How far the engine guesses ahead, and how much of a guess was right."""

from sharp.plugins.manifest import Manifest
from sharp.plugins.sampling import NO_TOKEN
from sharp.serving.backends import Backend
from sharp.serving.config import EngineConfig
from sharp.serving.engine.scheduler import Chunk

SPECULATIVE_TOKENS = 8


def speculative_tokens(config: EngineConfig, backend: Backend, manifest: Manifest) -> int:
    """How many tokens a step may guess.

    What it gains on a GPU was not measured, so there it must be asked for. A block of an int8 cache has one scale for
    all its tokens: a guess would round those before it anew.
    """
    if config.speculative_tokens is not None:
        return config.speculative_tokens
    return SPECULATIVE_TOKENS if backend.device == "cpu" and manifest.cache.dtype != "int8" else 0


def agreed(chunk: Chunk, drawn: list[int]) -> list[int]:
    """The tokens drawn from the logits of a chunk, up to the first that was guessed wrongly or ends the answer."""
    for place, (token, guessed) in enumerate(zip(drawn, chunk.draft, strict=False)):
        if token != guessed or token in chunk.sequence.stop_token_ids:
            return drawn[: place + 1]
        if drawn[place + 1] == NO_TOKEN:  # without a guess the next step finds out why
            return drawn[: place + 1]
    return drawn
