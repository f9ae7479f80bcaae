"""The hash that ties a model folder to the checkpoint it was made from."""

import hashlib
from collections.abc import Iterable
from pathlib import Path


def sha256(files: Iterable[Path]) -> str:
    """The SHA-256 of the files' contents, one after the other, in hexadecimal."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()
