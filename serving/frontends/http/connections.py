"""`Connections`: the limit of open connections, and which of them gives way to a new one."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, IntEnum, auto

from sharp.serving.security.address import network_of

# The number of connections beyond the limit, for requests for health only.
RESERVE = 16


class Admission(Enum):
    """The requests that a new connection may make: all, health checks only (the port is full), or none."""

    ALL = auto()
    HEALTH = auto()
    NOTHING = auto()


class Waiting(IntEnum):
    """The part of a request that a connection waits for. A connection with a lower number gives way first."""

    REQUEST = 0  # for a handshake, or for the header of a request
    BODY = 1  # of a request that is being served, so its token, if the server requires tokens, is valid


@dataclass(frozen=True)
class _Place:
    waiting: Waiting
    network: str


class Connections:
    """The open connections of a port. Connections with a running request stay; another one gives way to a new one.

    The connection that gives way is the oldest of the network with the most connections that wait for a request. An
    upload is ended only if no connection waits for a request: idle connections, however many and fast, end no request
    that has begun.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: set[object] = set()
        self._places: dict[object, _Place] = {}
        # The connections that wait for their clients, by what they wait for and by network, in the order in which the
        # wait began, each with the function that ends it.
        self._waiting: dict[Waiting, dict[str, dict[object, Callable[[], object]]]] = {kind: {} for kind in Waiting}

    def admit(self) -> Admission:
        """Make room for a new connection if there is none, and return what the connection may be used for."""
        if len(self._open) < self._most or self.end_one():
            return Admission.ALL
        return Admission.HEALTH if len(self._open) < self._most + RESERVE else Admission.NOTHING

    def end_one(self) -> bool:
        """End the connection that gives way first; return False if none waits for its client."""
        networks = next((found for found in self._waiting.values() if found), None)
        if networks is None:
            return False
        largest = max(networks.values(), key=len)
        connection, end = next(iter(largest.items()))
        self.remove(connection)
        end()
        return True

    def waits(
        self, connection: object, end: Callable[[], object], waiting: Waiting = Waiting.REQUEST, host: str = ""
    ) -> None:
        """Note that a connection, new or not, begins to wait for its client, whose address is `host`.

        `end` is called without arguments to close the connection if it must give way to another.
        """
        self._open.add(connection)
        self.serves(connection)
        place = _Place(waiting, network_of(host))
        self._places[connection] = place
        self._waiting[waiting].setdefault(place.network, {})[connection] = end

    def serves(self, connection: object) -> None:
        """Note that a connection has got a request."""
        place = self._places.pop(connection, None)
        if place is not None:
            networks = self._waiting[place.waiting]
            del networks[place.network][connection]
            if not networks[place.network]:
                del networks[place.network]

    def remove(self, connection: object) -> None:
        """Forget a connection that has ended."""
        self.serves(connection)
        self._open.discard(connection)
