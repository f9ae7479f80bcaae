"""Speculative decoding: draft tokens found by prompt lookup, and the maximum number of them per step."""

from collections.abc import Sequence as Rows

import numpy as np
from numpy.typing import NDArray

from sharp.core.manifest import Manifest
from sharp.serving.backends import DecoderBackend
from sharp.serving.config import EngineConfig

SPECULATIVE_TOKENS = 8


class PromptLookup:
    """Prompt lookup decoding (https://github.com/apoorvumang/prompt-lookup-decoding) over one sequence.

    Prompt and generated tokens are kept in one int32 array, which each step searches.
    """

    def __init__(self, token_ids: Rows[int]) -> None:
        self._tokens = np.array(token_ids, np.int32)
        self._count = len(token_ids)

    def append(self, token_id: int) -> None:
        """Append a generated token to the text that draft tokens are looked up in."""
        if self._count == len(self._tokens):
            self._tokens = np.resize(self._tokens, 2 * self._count)
        self._tokens[self._count] = token_id
        self._count += 1

    def draft(self, most: int) -> list[int]:
        """Return up to `most` draft tokens: the tokens that followed the longest earlier match of the last tokens.

        Among equally long matches the latest is used. A match of m tokens gives m - 1 draft tokens: the longer the
        repeated passage, the likelier it continues, and a match of one token means nothing.
        """
        tokens = self._tokens[: self._count]
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])  # position of each match's last token
        length = 1
        while length <= most and len(longer := _longer(tokens, ends, length)):
            ends, length = longer, length + 1
        if length == 1:
            return []
        # A match that overlaps the end is a loop, which continues from its beginning.
        draft: list[int] = np.resize(tokens[ends[-1] + 1 :][: length - 1], length - 1).tolist()
        return draft


def _longer(tokens: NDArray[np.int32], ends: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """Return the `ends` of the matches of `length` tokens that can be extended by one token to the left."""
    ends = ends[ends >= length]
    return ends[tokens[ends - length] == tokens[-1 - length]] if len(ends) else ends


def speculative_tokens(config: EngineConfig, backend: DecoderBackend, manifest: Manifest) -> int:
    """Return the maximum number of draft tokens of a step.

    On a GPU drafts are off unless set, because the gain is not measured there. They are also off with an int8 or fp8
    cache: a block has one scale for all its tokens, so a draft token could make the tokens before it be rounded again.
    """
    if config.speculative_tokens is not None:
        return config.speculative_tokens
    return SPECULATIVE_TOKENS if backend.device == "cpu" and not manifest.cache.beside else 0
