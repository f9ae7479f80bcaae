"""`BlockManager`: which blocks of the key-value cache belong to which request."""

import numpy as np
from numpy.typing import NDArray


class BlockManager:
    """Hands out blocks of `block_size` tokens and takes them back."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks = blocks
        self._free = list(range(blocks - 1, -1, -1))  # taken from the end: low blocks first
        self._tables: dict[str, NDArray[np.int32]] = {}

    @property
    def free(self) -> int:
        """How many blocks are free."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold."""
        return 1 - self.free / self.blocks

    def missing(self, request_id: str, tokens: int) -> int:
        """How many more blocks a request needs to hold `tokens` tokens."""
        return max(0, -(-tokens // self.block_size) - len(self.table(request_id)))

    def grow(self, request_id: str, tokens: int) -> None:
        """Give a request the blocks for `tokens` tokens; there must be enough (`missing` <= `free`)."""
        missing = self.missing(request_id, tokens)
        if not missing:
            return
        added, self._free[-missing:] = self._free[-missing:][::-1], []
        self._tables[request_id] = np.append(self.table(request_id), np.array(added, np.int32))

    def release(self, request_id: str) -> None:
        """Take back all blocks of a request; one that holds none is fine."""
        table = self._tables.pop(request_id, None)
        if table is not None:
            self._free.extend(table[::-1].tolist())

    def table(self, request_id: str) -> NDArray[np.int32]:
        """The blocks of a request in the order of its tokens, int32 [blocks]."""
        return self._tables.get(request_id, _NO_BLOCKS)

    def slots(self, request_id: str, positions: NDArray[np.int64]) -> NDArray[np.int32]:
        """Where in the cache the tokens at `positions` of a request lie, int32 [tokens]."""
        block, offset = np.divmod(positions, self.block_size)
        return (self.table(request_id)[block] * self.block_size + offset).astype(np.int32)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless every block is either free or in exactly one table."""
        seen = sorted(self._free + [block for table in self._tables.values() for block in table.tolist()])
        if seen != list(range(self.blocks)):
            raise RuntimeError(f"block accounting is broken: {len(seen)} entries for {self.blocks} blocks: {seen[:64]}")


_NO_BLOCKS = np.empty(0, np.int32)
