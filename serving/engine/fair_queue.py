"""`FairQueue`: the waiting sequences, and the order in which their clients are served (see `virtual_times`)."""

import heapq
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter

from sharp.serving.engine.sequence import Sequence
from sharp.serving.engine.virtual_times import VirtualTimes

RANK = attrgetter("rank")
Order = tuple[float, tuple[float, int]]


@dataclass
class _Client:
    """The sequences of a client that has some. `waiting` is sorted by rank."""

    waiting: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)


class FairQueue:
    """The queue of waiting sequences, which shares the server fairly among clients (start-time fair queueing).

    The client for which the fewest tokens were computed goes first; a client that comes late starts at the server's
    mean. Of one client, the sequence of the lowest `Sequence.rank` goes first. The queue also knows the running
    sequences, which it needs for the shares.
    """

    def __init__(self) -> None:
        self._clients: dict[str, _Client] = {}
        self._times = VirtualTimes()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over all waiting sequences in the order in which they would join if no other sequence came."""
        ordered = heapq.merge(*map(self._in_order, self._clients), key=lambda pair: pair[0])
        return (sequence for _, sequence in ordered)

    def __contains__(self, sequence: Sequence) -> bool:
        client = self._clients.get(sequence.client)
        return client is not None and sequence in client.waiting

    def first(self, count: int) -> list[Sequence]:
        """Return the first `count` waiting sequences, or all if there are fewer."""
        return list(islice(self, count))

    def add(self, sequence: Sequence) -> None:
        """Put a new or preempted sequence into the queue."""
        client = self._clients.setdefault(sequence.client, _Client())
        if sequence in client.running:
            client.running.remove(sequence)
        if not client.waiting:
            self._times.enter(sequence.client)
        insort(client.waiting, sequence, key=RANK)
        self._length += 1

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that waits or runs. A sequence that was never added is ignored."""
        client = self._clients.get(sequence.client)
        if client is None:
            return
        if sequence in client.waiting:
            client.waiting.remove(sequence)
            self._length -= 1
        elif sequence in client.running:
            client.running.remove(sequence)
        if not (client.waiting or client.running):
            del self._clients[sequence.client]
            self._times.leave(sequence.client)

    def order_of(self, sequence: Sequence) -> Order:
        """Return the order, (virtual time, rank), that a waiting sequence would have among the running sequences.

        Smaller orders run first and are preempted last.
        """
        client = self._clients[sequence.client]
        # A sequence of a better rank goes before running sequences of the same client, at no other client's expense.
        worse = [other.order[0] for other in client.running if other.rank > sequence.rank]
        return min([self._times[sequence.client], *worse]), sequence.rank

    def admit(self, sequence: Sequence, tokens: int) -> None:
        """Let a waiting sequence run, and charge its client the `tokens` of the prompt that must be computed."""
        sequence.order = self.order_of(sequence)
        client = self._clients[sequence.client]
        client.waiting.remove(sequence)
        client.running.append(sequence)
        self._length -= 1
        self.charge(sequence, max(tokens, 1))

    def charge(self, sequence: Sequence, tokens: int) -> None:
        """Charge the client of a sequence `tokens` computed tokens. A client without requests is ignored."""
        self._times.charge(sequence.client, tokens)

    def longest(self) -> list[Sequence]:
        """Return the waiting sequences of the client that has most of them; empty if none waits."""
        return max((client.waiting for client in self._clients.values()), key=len, default=[])

    def waiting_of(self, client: str) -> int:
        """Return the number of waiting sequences of a client."""
        found = self._clients.get(client)
        return len(found.waiting) if found else 0

    def running_of(self) -> dict[str, list[Sequence]]:
        """Return the running sequences of every client that has some, sorted so that the last is preempted first."""
        return {
            name: sorted(client.running, key=attrgetter("order"))
            for name, client in self._clients.items()
            if client.running
        }

    def _in_order(self, client: str) -> Iterator[tuple[Order, Sequence]]:
        """Yield the waiting sequences of a client, each with the virtual time at which it would start, and its rank."""
        start = self._times[client]
        for sequence in self._clients[client].waiting:
            yield (start, sequence.rank), sequence
            start += len(sequence.token_ids)
