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
    """Fuzz until libFuzzer ends the process, without the end of Python: whoever started it removes its folder."""
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
    if not any(Path(option).is_file() for option in options):  # such files are run once
        options.append(str(folder / "seeds"))
    atheris.Setup([sys.argv[0], longest, *options], target.check, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
