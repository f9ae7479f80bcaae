"""`SamplingState`: what sampling a sequence's next token depends on besides the logits."""

from collections import deque

import numpy as np

from sharp.serving.api.request import GenerateRequest
from sharp.serving.engine.token_counts import TokenCounts


class SamplingState:
    """Random numbers, token counts for the penalties, and the guide of one sequence.

    Attributes:
        counts: the sequence's tokens, if it has penalties.
        guide: the sequence's position in its grammar, if it has one.
        allowed: int64 [tokens], the only ones that may be generated, if not all may.
    """

    def __init__(self, request: GenerateRequest, index: int) -> None:
        params = request.params
        # A generator per sequence: its numbers depend on seed and index and on nothing else in the batch.
        self._random = np.random.Generator(
            np.random.Philox(np.random.SeedSequence(params.seed, spawn_key=(index,) if index else ()))
        )
        self._uniforms: deque[float] = deque()  # of the next tokens
        self.counts = TokenCounts(request.prompt_ids) if params.has_penalties else None
        self.guide = request.guide.copy() if request.guide else None
        self.allowed = np.array(params.allowed_token_ids, np.int64) if params.allowed_token_ids else None

    def uniform(self, ahead: int) -> float:
        """The random number in [0, 1) of the token that follows `ahead` draft tokens."""
        while len(self._uniforms) <= ahead:
            self._uniforms.append(self._random.random())
        return self._uniforms[ahead]

    def append(self, token_id: int) -> None:
        """Go on to the next token."""
        if self._uniforms:
            self._uniforms.popleft()
        if self.counts:
            self.counts.add(token_id)
