"""`QueueLimit`: how much may wait, and when to come back."""

import time
from collections import deque
from collections.abc import Iterable

from sharp.serving.api.errors import QueueFullError
from sharp.serving.api.request import GenerateRequest
from sharp.serving.engine.sequence import Sequence

ADMISSIONS = 64  # the rate is that of the last so many
UNKNOWN_SECONDS = 1.0
SHORTEST_SECONDS, LONGEST_SECONDS = 0.1, 60.0


class QueueLimit:
    """Refuses requests when too many sequences, or too many tokens of prompts, wait for their first step.

    A client that is refused is told a time after which, at the rate of the last admissions, there would be room.
    """

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._admissions: deque[tuple[float, int]] = deque(maxlen=ADMISSIONS)  # (time, tokens of the prompt)

    def admitted(self, sequence: Sequence, now: float) -> None:
        """Note that a sequence no longer waits."""
        self._admissions.append((now, len(sequence.token_ids)))

    def check(self, request: GenerateRequest, waiting: Iterable[Sequence]) -> None:
        """Let a request in, or raise QueueFullError. Where nothing waits, any request may."""
        # Each sequence has its own copy of the prompt.
        sizes = [(1 if one.times.started or one.index else one.request.params.n, len(one.token_ids)) for one in waiting]
        if not sizes:
            return
        waiting_sequences, waiting_tokens = sum(n for n, _ in sizes), sum(n * tokens for n, tokens in sizes)
        sequences = waiting_sequences + request.params.n
        tokens = waiting_tokens + request.params.n * len(request.prompt_ids)
        if sequences > self._max_requests:
            what = f"{waiting_sequences} sequences wait already; the limit is {self._max_requests}"
        elif tokens > self._max_tokens:
            what = f"{waiting_tokens} prompt tokens wait already; the limit is {self._max_tokens}"
        else:
            return
        seconds = self._seconds_until_gone(sequences - self._max_requests, tokens - self._max_tokens)
        raise QueueFullError(f"{what}; try again in {seconds:.1f} s", seconds)

    def _seconds_until_gone(self, sequences: int, tokens: int) -> float:
        """How long it takes, at the current rate, until so many sequences and tokens have left the queue."""
        elapsed = time.perf_counter() - self._admissions[0][0] if self._admissions else 0.0
        if not elapsed:
            return UNKNOWN_SECONDS
        seconds_per_sequence = elapsed / len(self._admissions)
        seconds_per_token = elapsed / sum(tokens for _, tokens in self._admissions)
        seconds = max(sequences * seconds_per_sequence, tokens * seconds_per_token)
        return min(max(seconds, SHORTEST_SECONDS), LONGEST_SECONDS)
