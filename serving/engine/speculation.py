"""Speculative decoding: draft tokens, found in the sequence itself, and how many a step may have."""

from collections.abc import Sequence as Rows

import numpy as np
from numpy.typing import NDArray

from sharp.plugins.manifest import Manifest
from sharp.serving.backends import Backend
from sharp.serving.config import EngineConfig

SPECULATIVE_TOKENS = 8


class PromptLookup:
    """Prompt lookup decoding (https://github.com/apoorvumang/prompt-lookup-decoding) over one sequence.

    Prompt and generated tokens lie in one array, int32, which each step searches.
    """

    def __init__(self, token_ids: Rows[int]) -> None:
        self._tokens = np.array(token_ids, np.int32)
        self._count = len(token_ids)

    def append(self, token_id: int) -> None:
        """Add the token that came next."""
        if self._count == len(self._tokens):
            self._tokens = np.resize(self._tokens, 2 * self._count)
        self._tokens[self._count] = token_id
        self._count += 1

    def draft(self, most: int) -> list[int]:
        """At most `most` draft tokens: those that followed the longest earlier match of the last tokens.

        Of equally long matches the latest counts. A match of m tokens gives m - 1 draft tokens: the longer a passage
        is repeated, the likelier it goes on, and a match of one token means nothing.
        """
        tokens = self._tokens[: self._count]
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])  # last positions of the matches
        length = 1
        while length <= most and len(longer := _longer(tokens, ends, length)):
            ends, length = longer, length + 1
        if length == 1:
            return []
        # A match that overlaps the end is a loop: it goes on from where it began.
        draft: list[int] = np.resize(tokens[ends[-1] + 1 :][: length - 1], length - 1).tolist()
        return draft


def _longer(tokens: NDArray[np.int32], ends: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """The `ends` of those matches of `length` tokens that are longer by one token."""
    ends = ends[ends >= length]
    return ends[tokens[ends - length] == tokens[-1 - length]] if len(ends) else ends


def speculative_tokens(config: EngineConfig, backend: Backend, manifest: Manifest) -> int:
    """Most draft tokens of a step.

    The gain on a GPU is not measured, so there it is off unless set. A block of an int8 or fp8 cache has one scale for
    all its tokens: a draft token would round those before it anew.
    """
    if config.speculative_tokens is not None:
        return config.speculative_tokens
    return SPECULATIVE_TOKENS if backend.device == "cpu" and not manifest.cache.beside else 0
