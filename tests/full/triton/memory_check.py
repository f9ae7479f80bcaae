"""The checks of NVIDIA's memcheck and racecheck, for interpreted kernels.

A kernel may read and write only the tensors of its launch. Two accesses to one address, at least one of them a write,
must be by one program with a barrier between them, because any two threads may have made them; but all threads may
write the same value. A kernel that obeys these rules does not depend on the order in which programs and warps run.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

ANYTHING = 101


@dataclass
class Accesses:
    """The accesses to one tensor: its addresses, and the times at which each was last read and written, or 0."""

    begin: int
    end: int

    def __post_init__(self) -> None:
        self.read = np.zeros(self.end - self.begin, np.int64)
        self.written = np.zeros(self.end - self.begin, np.int64)


def place_of(tensor: Any) -> tuple[int, int]:
    """Return the first address of a torch tensor, and the address after its end."""
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


class MemoryCheck:
    """A check of the accesses of the launch in progress.

    Time counts the barriers of all programs, which run one after the other.
    """

    def __init__(self) -> None:
        self._tensors: list[Accesses] = []
        self._program: tuple[int, ...] | None = None
        self._begun = self._now = 1  # the time at which the program began, and the time now
        # counts of the numbers that all launches have read, by the address of the tensor
        self.read: Counter[int] = Counter()

    @contextmanager
    def watched(self, places: Iterable[tuple[int, int]]) -> Iterator[None]:
        """Check the accesses of a launch in the block, which may access only tensors at `places`."""
        self._tensors, self._program = [Accesses(*place) for place in sorted(set(places))], None
        try:
            yield
        finally:
            self._tensors = []

    def barrier(self) -> None:
        self._now += 1

    def add(
        self, program: tuple[int, ...], addresses: np.ndarray, changes: Callable[[], np.ndarray] | None = None
    ) -> None:
        """Record the accesses of a program: reads, or writes with `changes`.

        `changes` returns which of the writes change a value.

        Raises:
            AssertionError: An address is in no tensor, or another program accessed it, or no barrier lies between.
        """
        if not self._tensors or not addresses.size:
            return
        if program != self._program:
            self._program, self._now = program, self._now + 1
            self._begun = self._now
        found = np.searchsorted([tensor.begin for tensor in self._tensors], addresses, side="right") - 1
        ends = np.array([tensor.end for tensor in self._tensors], np.uint64)
        assert ((found >= 0) & (addresses < ends[found])).all(), "a kernel reads or writes beside its tensors"
        changed = changes() if changes else None
        for index in np.unique(found):
            tensor, mine = self._tensors[index], found == index
            places = (addresses[mine] - np.uint64(tensor.begin)).astype(np.int64)
            if changed is None:
                self._ordered(tensor.written[places])
                tensor.read[places] = self._now
                self.read[tensor.begin] += places.size
            else:
                self._ordered(tensor.written[places[changed[mine]]])
                self._ordered(tensor.read[places[changed[mine]]])
                tensor.written[places] = self._now

    def _ordered(self, times: np.ndarray) -> None:
        earlier = times[times > 0]
        assert (earlier >= self._begun).all(), "two programs of a kernel access one address"
        assert (earlier < self._now).all(), "a kernel accesses an address twice without a barrier between"

    def install(self) -> None:
        """Check all reads and writes of this process's interpreter while tensors are watched."""
        from triton.runtime.interpreter import InterpreterBuilder

        load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
        check = self

        def checked_load(builder: Any, pointers: Any, mask: Any, other: Any, *rest: Any, **named: Any) -> Any:
            bits = mask if isinstance(mask, np.ndarray) else mask.data  # the mask of a tensor descriptor is an array
            chosen = bits.astype(bool)  # the interpreter makes masks of integers where a number takes part
            check.add(builder.grid_idx, pointers.data[chosen])
            loaded = load(builder, pointers, mask, other, *rest, **named)
            # masked numbers are undefined; the interpreter needs a scalar 0 for itself
            if other is None and bits.size > 1:
                loaded.data[~chosen] = np.nan if loaded.data.dtype.kind == "f" else ANYTHING
            return loaded

        def checked_store(builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
            chosen = mask.data.astype(bool)

            def changes() -> np.ndarray:
                there = load(builder, pointers, mask, None, None, None, False).data[chosen]
                bits = f"u{there.itemsize}"
                different: np.ndarray = there.view(bits) != value.data[chosen].astype(there.dtype).view(bits)
                return different

            check.add(builder.grid_idx, pointers.data[chosen], changes)
            result = store(builder, pointers, value, mask, *rest)
            assert not changes().any(), "a kernel writes two values to one address"
            return result

        InterpreterBuilder.create_masked_load = checked_load
        InterpreterBuilder.create_masked_store = checked_store
        InterpreterBuilder.create_barrier = lambda builder: check.barrier()

    def around(self, launch: Callable[..., None]) -> Callable[..., None]:
        """Return `launching.launch` with its accesses checked."""

        def watched(kernel: Any, shapes: Any, arguments: dict[str, Any]) -> None:
            given = [arguments[name] for name, kind in kernel.signature.items() if kind.startswith("*")]
            with self.watched(place_of(tensor) for tensor in given if tensor is not None):
                launch(kernel, shapes, arguments)

        return watched
