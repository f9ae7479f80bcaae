"""`Connections`: how many there may be, and which of them gives way to a new one."""

from collections.abc import Callable
from enum import Enum, auto

# Beyond the limit, for health only.
RESERVE = 16


class Admission(Enum):
    """What a new connection is for."""

    ALL = auto()
    HEALTH = auto()
    NOTHING = auto()


class Connections:
    """The open connections of a port. Those that serve a request stay; of the others the oldest gives way."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: set[object] = set()
        # Those whose clients have a header or a body to send, in the order in which that began, and how to end them.
        self._waiting: dict[object, Callable[[], object]] = {}

    def admit(self) -> Admission:
        """Make room for a new connection if there is none, and say what it may be used for."""
        if len(self._open) < self._most or self.end_oldest():
            return Admission.ALL
        return Admission.HEALTH if len(self._open) < self._most + RESERVE else Admission.NOTHING

    def end_oldest(self) -> bool:
        """End the connection that has waited longest for its client; False if none waits."""
        if not self._waiting:
            return False
        connection = next(iter(self._waiting))
        end = self._waiting.pop(connection)
        self._open.discard(connection)
        end()
        return True

    def waits(self, connection: object, end: Callable[[], object]) -> None:
        """A connection, new or not, begins to wait for its client."""
        self._open.add(connection)
        self._waiting.pop(connection, None)
        self._waiting[connection] = end

    def serves(self, connection: object) -> None:
        """A connection has got a request."""
        self._waiting.pop(connection, None)

    def remove(self, connection: object) -> None:
        """A connection has ended."""
        self._waiting.pop(connection, None)
        self._open.discard(connection)
