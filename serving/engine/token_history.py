"""`TokenHistory`: what a sequence has said, to guess what it says next."""

from collections.abc import Sequence as Rows

import numpy as np
from numpy.typing import NDArray


class TokenHistory:
    """The tokens of prompt and answer in one array, int32, which a search of each step goes through."""

    def __init__(self, token_ids: Rows[int]) -> None:
        self._tokens = np.array(token_ids, np.int32)
        self._count = len(token_ids)

    def append(self, token_id: int) -> None:
        """Add the token that came next."""
        if self._count == len(self._tokens):
            self._tokens = np.resize(self._tokens, 2 * self._count)
        self._tokens[self._count] = token_id
        self._count += 1

    def guess(self, most: int) -> list[int]:
        """The tokens that may come next, at most `most`: those that followed when the last ones were last said.

        Prompt lookup decoding (https://github.com/apoorvumang/prompt-lookup-decoding) with the longest match, and the
        latest of equals. As many tokens are guessed as agree, less one: the longer a passage is repeated, the likelier
        it goes on, and one token that agrees means nothing.
        """
        tokens = self._tokens[: self._count]
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])  # of passages of which so many tokens agree
        agree = 1
        while agree <= most and len(longer := _longer(tokens, ends, agree)):
            ends, agree = longer, agree + 1
        if agree == 1:
            return []
        # A passage that has not ended yet is a loop: it goes on from where it began.
        following: list[int] = np.resize(tokens[ends[-1] + 1 :][: agree - 1], agree - 1).tolist()
        return following


def _longer(tokens: NDArray[np.int32], ends: NDArray[np.int64], agree: int) -> NDArray[np.int64]:
    """Those `ends` before which one token more agrees."""
    ends = ends[ends >= agree]
    return ends[tokens[ends - agree] == tokens[-1 - agree]] if len(ends) else ends
