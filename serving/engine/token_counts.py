"""`TokenCounts`: which tokens a sequence has, for the penalties on repeating them."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray


class TokenCounts:
    """The distinct tokens of a sequence, and how often each was generated.

    `token_ids` int64 [distinct] and `counts` float32 [distinct] only grow by what is new: a step costs no pass over the
    sequence or the vocabulary.
    """

    def __init__(self, prompt_ids: Iterable[int]) -> None:
        self._index = {token_id: index for index, token_id in enumerate(dict.fromkeys(prompt_ids))}
        self.token_ids: NDArray[np.int64] = np.fromiter(self._index, np.int64)
        self.counts = np.zeros(len(self.token_ids), np.float32)

    def add(self, token_id: int) -> None:
        """Count a generated token."""
        index = self._index.get(token_id)
        if index is None:
            index = self._index[token_id] = len(self._index)
            self.token_ids = np.append(self.token_ids, token_id)
            self.counts = np.append(self.counts, np.float32(0))
        self.counts[index] += 1

    def after(self, tokens: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """`token_ids` and `counts` as they would be with these tokens more."""
        if not tokens:
            return self.token_ids, self.counts
        new = [token for token in dict.fromkeys(tokens) if token not in self._index]
        token_ids = np.append(self.token_ids, np.array(new, np.int64))
        counts = np.append(self.counts, np.zeros(len(new), np.float32))
        for token in tokens:
            counts[self._index[token] if token in self._index else len(self._index) + new.index(token)] += 1
        return token_ids, counts
