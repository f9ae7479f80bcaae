"""`TokenCounts`: which tokens a sequence has, for the penalties on repeating them."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray


class TokenCounts:
    """The distinct tokens of prompt and answer, and how often each is in the answer.

    `token_ids` int64 [distinct] and `counts` float32 [distinct] only grow by what is new: a step costs no pass over the
    sequence or the vocabulary.
    """

    def __init__(self, prompt_ids: Iterable[int]) -> None:
        self._place = {token_id: place for place, token_id in enumerate(dict.fromkeys(prompt_ids))}
        self.token_ids: NDArray[np.int64] = np.fromiter(self._place, np.int64)
        self.counts = np.zeros(len(self.token_ids), np.float32)

    def add(self, token_id: int) -> None:
        """Count a token of the answer."""
        place = self._place.get(token_id)
        if place is None:
            place = self._place[token_id] = len(self._place)
            self.token_ids = np.append(self.token_ids, token_id)
            self.counts = np.append(self.counts, np.float32(0))
        self.counts[place] += 1

    def after(self, tokens: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """`token_ids` and `counts` as they would be with these tokens more."""
        if not tokens:
            return self.token_ids, self.counts
        new = [token for token in dict.fromkeys(tokens) if token not in self._place]
        token_ids = np.append(self.token_ids, np.array(new, np.int64))
        counts = np.append(self.counts, np.zeros(len(new), np.float32))
        for token in tokens:
            counts[self._place[token] if token in self._place else len(self._place) + new.index(token)] += 1
        return token_ids, counts
