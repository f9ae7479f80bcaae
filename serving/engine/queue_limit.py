"""`QueueLimit`: limits how much may wait in the queue, and tells refused clients when to retry."""

import time
from collections import deque

from sharp.serving.api.errors import QueueFullError

ADMISSIONS = 64  # number of recent admissions from which the rate is computed
UNKNOWN_SECONDS = 1.0
SHORTEST_SECONDS, LONGEST_SECONDS = 0.1, 60.0


class QueueLimit:
    """A limit that refuses requests when too many sequences or prompt tokens wait for their first step.

    A refused client is told a time after which, at the rate of recent admissions, there should be room.
    """

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._admissions: deque[tuple[float, int]] = deque(maxlen=ADMISSIONS)  # (time, tokens of the prompt)

    def admitted(self, tokens: int, now: float) -> None:
        """Record that a sequence with a prompt of `tokens` tokens left the queue at `now` (`time.perf_counter`)."""
        self._admissions.append((now, tokens))

    def check(self, sequences: int, tokens: int, waiting_sequences: int, waiting_tokens: int) -> None:
        """Raise QueueFullError if the queue has no room for a request; any request may enter an empty queue.

        The request has `sequences` sequences and `tokens` prompt tokens in all. The other arguments count those that
        wait.
        """
        if not waiting_sequences:
            return
        sequences, tokens = waiting_sequences + sequences, waiting_tokens + tokens
        if sequences > self._max_requests:
            what = f"{waiting_sequences} sequences wait already; the limit is {self._max_requests}"
        elif tokens > self._max_tokens:
            what = f"{waiting_tokens} prompt tokens wait already; the limit is {self._max_tokens}"
        else:
            return
        seconds = self._seconds_until_gone(sequences - self._max_requests, tokens - self._max_tokens)
        raise QueueFullError(f"{what}; try again in {seconds:.1f} s", seconds)

    def _seconds_until_gone(self, sequences: int, tokens: int) -> float:
        """Return the seconds after which, at the current rate, `sequences` and `tokens` have left the queue."""
        elapsed = time.perf_counter() - self._admissions[0][0] if self._admissions else 0.0
        if not elapsed:
            return UNKNOWN_SECONDS
        seconds_per_sequence = elapsed / len(self._admissions)
        seconds_per_token = elapsed / sum(tokens for _, tokens in self._admissions)
        seconds = max(sequences * seconds_per_sequence, tokens * seconds_per_token)
        return min(max(seconds, SHORTEST_SECONDS), LONGEST_SECONDS)
