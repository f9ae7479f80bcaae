"""Fuzzes one target by coverage: `python -m tests.full.fuzz.covered TARGET [libFuzzer's options] [corpus folders]`.

Atheris instruments the functions of `sharp`, and libFuzzer keeps inputs that run a new edge of the code. A finding ends
the process.
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
SHORTEST = 4096  # libFuzzer's limit of an input, in bytes, unless a seed is long
OWN_SHARE = 0.5  # share of mutations by the target's own mutator; the others are libFuzzer's


def instrument() -> int:
    """Instrument all loaded functions of some packages, and return how many there are."""
    functions = [found for found in gc.get_objects() if isinstance(found, FunctionType)]
    found = [function for function in functions if str(function.__module__).partition(".")[0] in PACKAGES]
    for function in found:
        atheris.instrument_func(function)
    return len(found)


def main() -> None:
    """Fuzz until libFuzzer ends the process.

    Python's own end does not run, so the caller removes the temporary folder.
    """
    name, *options = sys.argv[1:]
    logging.disable()
    folder = Path(tempfile.mkdtemp())
    (folder / "files").mkdir()
    target = maker(name)(folder / "files")
    write_inputs([*target.seeds, *kept_inputs(name)], folder / "seeds")
    print(f"{name}: {instrument()} functions", file=sys.stderr)

    def mutate(content: bytes, most: int, seed: int) -> bytes:
        if random.Random(seed).random() < OWN_SHARE:
            return target.damaged(content, seed)[:most]
        return bytes(atheris.Mutate(content, most))

    longest = f"-max_len={max(SHORTEST, *(2 * len(seed) for seed in target.seeds))}"
    if not any(Path(option).is_file() for option in options):  # libFuzzer runs given files once, without mutations
        options.append(str(folder / "seeds"))
    atheris.Setup([sys.argv[0], longest, *options], target.check, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
