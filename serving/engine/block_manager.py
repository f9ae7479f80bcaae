"""`BlockManager`: assigns blocks of the key-value cache to sequences and finds cached blocks again.

The prefix cache finds a block by a chain of hashes over all tokens from the start of a sequence: `BlockHashes`.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence as Rows

import numpy as np
from numpy.typing import NDArray

from sharp.core.manifest import Manifest


class BlockManager:
    """The owner of the cache's blocks of `block_size` tokens, which sequences get, share and give back.

    A sequence is named by its number, which the caller chooses (`Sequence.number`).

    The prefix cache knows a full, computed block by the hash of all tokens up to its end. Any sequence that starts with
    these tokens can share the block, because no sequence writes into it again. A block without a holder is free. Its
    content can still be found until the block is handed out again, least recently used first.
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
        """The number of blocks that no sequence holds."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """The share of blocks that sequences hold, from 0 to 1."""
        return 1 - self.free / self.blocks

    def table(self, number: int) -> NDArray[np.int32]:
        """Return the blocks of a sequence in the order of its tokens, int32 [blocks]; empty if it has none."""
        return self._tables.get(number, _NO_BLOCKS)

    def missing(self, number: int, tokens: int) -> int:
        """Return the number of additional blocks that a sequence needs to hold `tokens` tokens."""
        return max(0, -(-tokens // self.block_size) - len(self.table(number)))

    def grow(self, number: int, tokens: int) -> None:
        """Give a sequence the blocks for `tokens` tokens. There must be enough free blocks (`missing` <= `free`).

        `number` is the sequence's number.
        """
        missing = self.missing(number, tokens)
        if missing:
            added = [self._hand_out() for _ in range(missing)]
            self._tables[number] = np.append(self.table(number), np.array(added, np.int32))

    def _hand_out(self) -> int:
        """Take the free block that was freed first, remove its hash, and return it with one reference."""
        block, _ = self._free.popitem(last=False)
        self._unregister(block)
        self._references[block] = 1
        return block

    def cached(self, hashes: Rows[bytes]) -> list[int]:
        """Return the blocks that hold the longest cached prefix of a chain of hashes."""
        blocks = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def free_without(self, blocks: Rows[int]) -> int:
        """Return the number of blocks that remain free when a sequence holds `blocks`, too."""
        return self.free - sum(self._references[block] == 0 for block in blocks)

    def share(self, number: int, blocks: Rows[int]) -> None:
        """Start the table of a sequence, which must hold no blocks yet, with the blocks that `cached` found.

        `number` is the sequence's number.
        """
        for block in blocks:
            self._references[block] += 1
            self._free.pop(block, None)
        self._tables[number] = np.array(blocks, np.int32)

    def register(self, number: int, start: int, hashes: Rows[bytes]) -> None:
        """Add full, computed blocks of a sequence, from index `start` on, to the prefix cache under `hashes`.

        `number` is the sequence's number.
        """
        for block, block_hash in zip(self.table(number)[start : start + len(hashes)].tolist(), hashes, strict=True):
            # Two sequences may compute the same tokens at the same time; the cache keeps the first of the two blocks.
            if block_hash not in self._block_of:
                self._block_of[block_hash] = block
                self._hash_of[block] = block_hash

    def unregister(self, number: int) -> None:
        """Remove the blocks of a sequence from the prefix cache."""
        for block in self.table(number).tolist():
            self._unregister(block)

    def _unregister(self, block: int) -> None:
        """Remove the block from the prefix cache, if it is there."""
        block_hash = self._hash_of.pop(block, None)
        if block_hash is not None:
            del self._block_of[block_hash]

    def release(self, number: int) -> None:
        """Take back the blocks of a sequence. A sequence without blocks is ignored."""
        # The last block is freed, and so reused, first, because other sequences most likely share the start of this
        # sequence.
        for block in reversed(self._tables.pop(number, _NO_BLOCKS).tolist()):
            self._references[block] -= 1
            if not self._references[block]:
                self._free[block] = None
                self._free.move_to_end(block, last=block in self._hash_of)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless tables, reference counts, free blocks and hashes are consistent."""
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


def first_hash(manifest: Manifest, salt: str, isolation: str = "") -> bytes:
    """Return the hash that begins each chain of a model.

    Different models, norms, salts or values of `isolation` never share a block.

    The hash is SHA-256, so that no client can construct a prompt that is mistaken for another client's.
    """
    identity = [manifest.name, manifest.source.sha256, manifest.norm.model_dump(mode="json"), salt, isolation]
    return hashlib.sha256(json.dumps(identity).encode()).digest()


class BlockHashes:
    """The hashes of a sequence's full blocks. Each hash covers the hash before it and the tokens of its own block."""

    def __init__(self, start: bytes, block_size: int) -> None:
        self._start = start
        self._block_size = block_size
        self._hashes: list[bytes] = []

    def up_to(self, token_ids: list[int], tokens: int) -> list[bytes]:
        """Return the hashes of the full blocks in the first `tokens` of `token_ids`, which may only be appended to."""
        size = self._block_size
        blocks, known = tokens // size, len(self._hashes)
        if blocks > known:
            new = np.array(token_ids[known * size : blocks * size], np.int64)
            for block in new.reshape(-1, size):
                before = self._hashes[-1] if self._hashes else self._start
                self._hashes.append(hashlib.sha256(before + block.tobytes()).digest())
        return self._hashes[:blocks]
