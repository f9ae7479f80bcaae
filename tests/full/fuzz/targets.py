"""What is fuzzed by coverage: bytes go in, and a `SharpError` of one sentence may come out, but nothing else."""

import base64
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from sharp.plugins.errors import SharpError
from tests.full.fuzz.structured import Mutation, of_bytes

MODULES = ("wire_targets", "text_targets", "file_targets")
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
    """The inputs of a target that are in the repository: one in each line, as base64."""
    file = CORPUS / f"{name}.txt"
    return [base64.b64decode(line) for line in file.read_text().splitlines()] if file.is_file() else []


def keep(name: str, inputs: Sequence[bytes]) -> None:
    """Make these the inputs of a target that are in the repository."""
    CORPUS.mkdir(exist_ok=True)
    lines = sorted({base64.b64encode(content).decode() for content in inputs}, key=lambda line: (len(line), line))
    (CORPUS / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines))


def write_inputs(inputs: Sequence[bytes], folder: Path) -> None:
    """Write inputs as the files that libFuzzer reads."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, content in enumerate(inputs):
        (folder / str(number)).write_bytes(content)


def makers() -> dict[str, Callable[[Path], Target]]:
    """Name -> what makes the target in an empty folder."""
    found: dict[str, Callable[[Path], Target]] = {}
    for module in MODULES:
        found |= import_module(f"tests.full.fuzz.{module}").MAKERS
    return found


def maker(name: str) -> Callable[[Path], Target]:
    """One of `makers`; imports no more than it needs."""
    for module in MODULES:
        if name in (found := import_module(f"tests.full.fuzz.{module}").MAKERS):
            return found[name]
    raise KeyError(name)
