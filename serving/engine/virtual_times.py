"""`VirtualTimes`: the order in which the clients of an engine are served.

The order is start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996), with tokens as the cost, as in the virtual
token counter of Sheng et al. (Fairness in Serving Large Language Models, OSDI 2024). Every client has a virtual time at
which its next request starts: the number of tokens that were computed for the client, and at least the server's virtual
time, which advances by the mean over all clients that have requests. The client with the earliest virtual time goes
first. So a client that keeps a thousand requests waiting delays another client by about one request. No client
starves, because a client that waits keeps its virtual time, and the virtual time of clients that come grows.
"""


class VirtualTimes:
    """The virtual times, in tokens, of the clients that have requests."""

    def __init__(self) -> None:
        self._starts: dict[str, float] = {}
        self._time = 0.0

    def __getitem__(self, client: str) -> float:
        """Return the virtual time at which the next request of a client starts. The client has requests."""
        return self._starts[client]

    def enter(self, client: str) -> None:
        """Record that a client without waiting requests has one now. A client saves no credit in the meantime."""
        self._starts[client] = max(self._starts.get(client, self._time), self._time)

    def leave(self, client: str) -> None:
        """Forget a client whose last request has ended, so that its time no longer counts."""
        del self._starts[client]

    def charge(self, client: str, tokens: int) -> None:
        """Charge a client `tokens` computed tokens. A client without requests is ignored."""
        if client in self._starts:
            self._starts[client] += tokens
            self._time += tokens / len(self._starts)
