"""Objects with the settings of a user's class, which record the settings that the class reads."""

from collections.abc import ItemsView, Iterator, ValuesView
from types import SimpleNamespace
from typing import Any


class RecordedNamespace(SimpleNamespace):
    """A namespace that records in `read` which of its `names` are read. Reading `__dict__` reads all names."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        object.__setattr__(self, "read", set())
        object.__setattr__(self, "names", tuple(values))

    def __getattribute__(self, name: str) -> Any:
        if name not in ("read", "names", "__class__"):
            names = object.__getattribute__(self, "names") if name == "__dict__" else (name,)
            object.__getattribute__(self, "read").update(names)
        return super().__getattribute__(name)


class RecordedDict(dict[str, Any]):
    """A dictionary that records in `read` which of its `names` are read. Iterating over it reads all names."""

    def __init__(self, **values: Any) -> None:
        super().__init__(values)
        self.read: set[str] = set()
        self.names = tuple(values)

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def __iter__(self) -> Iterator[str]:
        self.read.update(self.names)
        return super().__iter__()

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a key, and record the key as read."""
        self.read.add(name)
        return super().get(name, default)

    def pop(self, name: str, *default: Any) -> Any:
        """Remove a key and return its value, and record the key as read."""
        self.read.add(name)
        return super().pop(name, *default)

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]  # dict's own view is of a private type
        """Return all keys with their values, and record all keys as read."""
        self.read.update(self.names)
        return super().items()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]  # dict's own view is of a private type
        """Return all values, and record all keys as read."""
        self.read.update(self.names)
        return super().values()
