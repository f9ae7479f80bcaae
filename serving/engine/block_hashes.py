"""Block hashes of the prefix cache: a chain over all tokens from the start of a sequence."""

import hashlib
import json

import numpy as np

from sharp.plugins.manifest import Manifest


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
