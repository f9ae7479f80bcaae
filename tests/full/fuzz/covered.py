"""Fuzzes one target by coverage: `python -m tests.full.fuzz.covered TARGET [libFuzzer's options] [corpus folders]`.

Atheris instruments the functions of `sharp`, libFuzzer keeps what runs a new edge. A finding ends the process.
"""

import gc
import logging
import random
import sys
import tempfile
from pathlib import Path
from types import FunctionType

import atheris

from tests.full.fuzz.targets import kept_inputs, maker, write_inputs

PACKAGES = ("sharp", "prometheus_client")
SHORTEST = 4096  # limit of an input
OWN_SHARE = 0.5  # of mutations; the others are libFuzzer's


def instrument() -> int:
    """Instrument all loaded functions of some packages; returns how many."""
    functions = [one for one in gc.get_objects() if isinstance(one, FunctionType)]
    found = [one for one in functions if str(one.__module__).partition(".")[0] in PACKAGES]
    for function in found:
        atheris.instrument_func(function)
    return len(found)


def main() -> None:
    """Fuzz until libFuzzer ends the process."""
    name, *options = sys.argv[1:]
    logging.disable()
    with tempfile.TemporaryDirectory(dir=memory_folder()) as place:
        folder = Path(place)
        (folder / "files").mkdir()
        target = maker(name)(folder / "files")
        write_inputs([*target.seeds, *kept_inputs(name)], folder / "seeds")
        print(f"{name}: {instrument()} functions", file=sys.stderr)

        def mutate(content: bytes, most: int, seed: int) -> bytes:
            if random.Random(seed).random() < OWN_SHARE:
                return target.damaged(content, seed)[:most]
            return bytes(atheris.Mutate(content, most))

        longest = f"-max_len={max(SHORTEST, *(2 * len(seed) for seed in target.seeds))}"
        options = [sys.argv[0], *options, longest, str(folder / "seeds")]
        atheris.Setup(options, target.check, custom_mutator=mutate)
        atheris.Fuzz()


def memory_folder() -> str | None:
    """Where files cost no disk."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


if __name__ == "__main__":
    main()
