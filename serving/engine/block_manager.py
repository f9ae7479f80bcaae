"""`BlockManager`: which blocks of the key-value cache belong to which sequence, and what is in the others.

The prefix cache finds a block by a chain of hashes over all tokens from the start of a sequence: `BlockHashes`.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence as Rows

import numpy as np
from numpy.typing import NDArray

from sharp.plugins.manifest import Manifest


class BlockManager:
    """Hands out blocks of `block_size` tokens, shares computed ones and takes them back.

    A full block whose tokens are computed is known by the hash of all tokens up to its end, and any sequence that
    starts with these tokens can hold it too: nobody writes into it again. A block that nobody holds is free; until it
    is handed out anew, least recently used first, its content can still be found.
    """

    def __init__(self, blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks = blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))  # handed out from the front
        self._references = [0] * blocks
        self._tables: dict[int, NDArray[np.int32]] = {}
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        """How many blocks nobody holds."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the blocks that sequences hold."""
        return 1 - self.free / self.blocks

    def table(self, number: int) -> NDArray[np.int32]:
        """The blocks of a sequence in the order of its tokens, int32 [blocks]."""
        return self._tables.get(number, _NO_BLOCKS)

    def missing(self, number: int, tokens: int) -> int:
        """How many more blocks a sequence needs to hold `tokens` tokens."""
        return max(0, -(-tokens // self.block_size) - len(self.table(number)))

    def grow(self, number: int, tokens: int) -> None:
        """Give a sequence the blocks for `tokens` tokens; there must be enough (`missing` <= `free`)."""
        missing = self.missing(number, tokens)
        if missing:
            added = [self._hand_out() for _ in range(missing)]
            self._tables[number] = np.append(self.table(number), np.array(added, np.int32))

    def _hand_out(self) -> int:
        block, _ = self._free.popitem(last=False)
        self._unregister(block)
        self._references[block] = 1
        return block

    def cached(self, hashes: Rows[bytes]) -> list[int]:
        """The blocks that hold the longest known start of a chain of hashes."""
        blocks = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def free_without(self, blocks: Rows[int]) -> int:
        """How many blocks are free once a sequence holds `blocks` too."""
        return self.free - sum(self._references[block] == 0 for block in blocks)

    def share(self, number: int, blocks: Rows[int]) -> None:
        """Start the table of a sequence with blocks that `cached` found."""
        for block in blocks:
            self._references[block] += 1
            self._free.pop(block, None)
        self._tables[number] = np.array(blocks, np.int32)

    def register(self, number: int, start: int, hashes: Rows[bytes]) -> None:
        """Add blocks of a sequence, full and computed, to the prefix cache: those from `start` on, by `hashes`."""
        for block, block_hash in zip(self.table(number)[start : start + len(hashes)].tolist(), hashes, strict=True):
            # Two sequences may compute the same tokens at the same time; one of the blocks is enough.
            if block_hash not in self._block_of:
                self._block_of[block_hash] = block
                self._hash_of[block] = block_hash

    def unregister(self, number: int) -> None:
        """Remove the blocks of a sequence from the prefix cache."""
        for block in self.table(number).tolist():
            self._unregister(block)

    def _unregister(self, block: int) -> None:
        block_hash = self._hash_of.pop(block, None)
        if block_hash is not None:
            del self._block_of[block_hash]

    def release(self, number: int) -> None:
        """Take back the blocks of a sequence; one that holds none is fine."""
        # Its last block first: the start of a sequence is what others are most likely to share.
        for block in reversed(self._tables.pop(number, _NO_BLOCKS).tolist()):
            self._references[block] -= 1
            if not self._references[block]:
                self._free[block] = None
                self._free.move_to_end(block, last=block in self._hash_of)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless tables, reference counts, free blocks and hashes agree."""
        tables = np.concatenate([_NO_BLOCKS, *self._tables.values()])
        held = np.bincount(tables, minlength=self.blocks)
        if held.tolist() != self._references:
            wrong = np.flatnonzero(held != self._references)[:16].tolist()
            raise RuntimeError(f"block accounting is broken: blocks {wrong} have wrong reference counts")
        if sorted(self._free) != np.flatnonzero(held == 0).tolist():
            raise RuntimeError(
                f"block accounting is broken: {self.free} free blocks, {(held == 0).sum()} without holder"
            )
        if any(len(np.unique(table)) < len(table) for table in self._tables.values()):
            raise RuntimeError("block accounting is broken: a sequence holds a block twice")
        if {block: block_hash for block_hash, block in self._block_of.items()} != self._hash_of:
            raise RuntimeError("block accounting is broken: hashes and blocks do not match")


_NO_BLOCKS = np.empty(0, np.int32)


def first_hash(manifest: Manifest, salt: str) -> bytes:
    """What the chains of a model begin with. Different models, norms or salts never share a block.

    SHA-256, so that nobody can make a prompt that is taken for someone else's.
    """
    identity = [manifest.name, manifest.source.sha256, manifest.norm.model_dump(mode="json"), salt]
    return hashlib.sha256(json.dumps(identity).encode()).digest()


class BlockHashes:
    """The hashes of a sequence's full blocks; each is over the one before it and its own tokens."""

    def __init__(self, start: bytes, block_size: int) -> None:
        self._start = start
        self._block_size = block_size
        self._hashes: list[bytes] = []

    def up_to(self, token_ids: list[int], tokens: int) -> list[bytes]:
        """The hashes of the full blocks among the first `tokens` of `token_ids`, which only ever grows."""
        size = self._block_size
        blocks, known = tokens // size, len(self._hashes)
        if blocks > known:
            new = np.array(token_ids[known * size : blocks * size], np.int64)
            for block in new.reshape(-1, size):
                before = self._hashes[-1] if self._hashes else self._start
                self._hashes.append(hashlib.sha256(before + block.tobytes()).digest())
        return self._hashes[:blocks]
