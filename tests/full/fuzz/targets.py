"""Targets of fuzzing by coverage: functions that read bytes and may raise only a `SharpError` of one sentence."""

import base64
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from sharp.core.errors import SharpError
from tests.full.fuzz.structured import Mutation, of_bytes

MODULES = ("wire_targets", "text_targets", "file_targets")
CORPUS = Path(__file__).parent / "corpus"


class NotOneSentenceError(Exception):
    """A message of several lines."""


@dataclass(frozen=True)
class Target:
    """A target of fuzzing.

    `run` reads bytes, `seeds` are good inputs, and `mutate` changes an input and keeps its form.
    """

    run: Callable[[bytes], object]
    seeds: Sequence[bytes]
    mutate: Mutation = of_bytes

    def check(self, content: bytes) -> None:
        """Read the bytes, and raise an exception that is a finding."""
        try:
            self.run(content)
        except SharpError as error:
            if "\n" in str(error):
                raise NotOneSentenceError(str(error)) from error

    def damaged(self, content: bytes, seed: int) -> bytes:
        """Return the bytes, damaged in a way that follows from the seed."""
        return self.mutate(content, random.Random(seed))


def kept_inputs(name: str) -> list[bytes]:
    """Return the inputs of a target that are in the repository, one base64 text per line."""
    file = CORPUS / f"{name}.txt"
    return [base64.b64decode(line) for line in file.read_text().splitlines()] if file.is_file() else []


def keep(name: str, inputs: Sequence[bytes]) -> None:
    """Replace the inputs of a target in the repository."""
    CORPUS.mkdir(exist_ok=True)
    lines = sorted({base64.b64encode(content).decode() for content in inputs}, key=lambda line: (len(line), line))
    (CORPUS / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines))


def write_inputs(inputs: Sequence[bytes], folder: Path) -> None:
    """Write inputs as the files that libFuzzer reads."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, content in enumerate(inputs):
        (folder / str(number)).write_bytes(content)


def makers() -> dict[str, Callable[[Path], Target]]:
    """Return all functions that make a target in an empty folder, by the target's name."""
    found: dict[str, Callable[[Path], Target]] = {}
    for module in MODULES:
        found |= import_module(f"tests.full.fuzz.{module}").MAKERS
    return found


def maker(name: str) -> Callable[[Path], Target]:
    """Return the function that makes the target `name`; imports only the module that defines it."""
    for module in MODULES:
        if name in (found := import_module(f"tests.full.fuzz.{module}").MAKERS):
            return found[name]
    raise KeyError(name)
