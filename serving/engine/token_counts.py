"""`TokenCounts`: which tokens a sequence has, for the penalties on repeating them."""

from collections.abc import Iterable

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
