"""What is fuzzed by coverage: bytes go in, and a `SharpError` of one sentence may come out, but nothing else."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sharp.plugins.errors import SharpError
from tests.full.fuzz.structured import Mutation, of_bytes

CORPUS = Path(__file__).parent / "corpus"


class NotOneSentenceError(Exception):
    """A message of several lines."""


@dataclass(frozen=True)
class Target:
    """`run` reads bytes; `seeds` are good ones; `mutate` changes them and keeps their form."""

    run: Callable[[bytes], object]
    seeds: Sequence[bytes]
    mutate: Mutation = of_bytes

    def check(self, content: bytes) -> None:
        """Read the bytes; raises what is a finding."""
        try:
            self.run(content)
        except SharpError as error:
            if "\n" in str(error):
                raise NotOneSentenceError(str(error)) from error

    def damaged(self, content: bytes, seed: int) -> bytes:
        """The bytes, damaged in a way that follows from the seed."""
        return self.mutate(content, random.Random(seed))


def kept_inputs(name: str) -> list[bytes]:
    """The inputs of a target that are in the repository."""
    return [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]


def makers() -> dict[str, Callable[[Path], Target]]:
    """Name -> what makes the target in an empty folder. Most of the libraries are loaded by the making."""
    from tests.full.fuzz import file_targets, text_targets, wire_targets

    return {**wire_targets.MAKERS, **text_targets.MAKERS, **file_targets.MAKERS}
