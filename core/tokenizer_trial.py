"""The trial of a tokenizer file in a process of its own, because the library panics or aborts at some files."""

import hashlib
import json
import os
import resource
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

from sharp.core.errors import InputError
from sharp.core.regular_file import read_regular_file

SECONDS = 8.0  # of processor time; a vocabulary of 256,000 tokens takes one or two
WALL_SECONDS = 60.0  # more than `SECONDS`, for a busy machine
MEMORY_BYTES = 900 * 2**20
MOST_BYTES = 2**28
PROGRAM = Path(__file__).with_name("tokenizer_worker.py")
# More threads of the library would take address space, which the memory limit counts.
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}


def check_tokenizer_file(path: Path) -> None:
    """Check that a `tokenizer.json` can be loaded and used, by a trial in a process of its own.

    A process tries each content once: the result for a file is kept for later files of the same content.

    Raises:
        InputError: the file does not exist or cannot be read, cannot be used within the limits of size, time and
            memory, or this process may take too little memory for the trial.
    """
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise InputError(f"{path} has {size} bytes; a tokenizer file has at most {MOST_BYTES}")
        digest = hashlib.sha256(read_regular_file(path, MOST_BYTES)).digest()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}; copy it again, or allow reading it") from error
    if reason := _reason(_Content(str(path), digest)):
        allowed, _ = resource.getrlimit(resource.RLIMIT_AS)
        if 0 <= allowed < MEMORY_BYTES:  # -1 means no limit
            raise InputError(
                f"{path} cannot be tried: this process may take {allowed >> 20} MB of address space, and a tokenizer "
                f"up to {MEMORY_BYTES >> 20}; raise the limit (ulimit -v)"
            )
        raise InputError(f"{path} is not a tokenizer file: {reason}; export the model again")


class _Content:
    """A file that equals other files of the same content, so that each content is tried once."""

    def __init__(self, path: str, digest: bytes) -> None:
        self.path = path
        self._digest = digest

    def __hash__(self) -> int:
        return hash(self._digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Content) and other._digest == self._digest


@lru_cache(64)
def _reason(content: _Content) -> str:
    """Return a sentence's end that says why the file cannot be used; empty if it can."""
    command = [sys.executable, "-P", str(PROGRAM), content.path, str(SECONDS), str(MEMORY_BYTES)]
    beyond = f"it takes more than {SECONDS:g} s or {MEMORY_BYTES >> 20} MB to load"
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, timeout=WALL_SECONDS, check=False, env={**os.environ, **ENVIRONMENT}
        )
        return str(json.loads(done.stdout)) if done.stdout else beyond
    except subprocess.TimeoutExpired:
        return beyond
