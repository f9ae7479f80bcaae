"""`python -m tests.full.faults --output FILE` injects many faults of every kind and reports lost requests."""

import argparse
import json
import logging
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from bench.result_file import header, write
from sharp.core.manifest import read_manifest
from sharp.serving.backends import load_backend
from sharp.serving.config import BackendConfig
from sharp.serving.text.tokenizer import Tokenizer
from tests.full.faults.commands import FAULTS as COMMAND_FAULTS
from tests.full.faults.commands import run_command_faults
from tests.full.faults.injection import FAULTS, check_fault
from tests.full.faults.overload import overload
from tests.full.faults.server_ends import ENDS, run_ends
from tests.full.faults.server_faults import FAULTS as SERVER_FAULTS
from tests.full.faults.server_faults import run_server_faults
from tests.serving.conftest import write_folder

CALLS = (1, 2, 3, 5, 8, 13, 21, 34, 55, 89)


def main() -> int:
    """Inject the faults, and return the exit code, 1 if an invariant broke."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loads", type=int, default=20, help="random loads for every kind and call [default: 20]")
    parser.add_argument("--times", type=int, default=12, help="faults of each kind of a server's; half of others [12]")
    parser.add_argument("--overload", type=float, default=120.0, help="seconds of ten times its capacity [120]")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)  # because every fault is logged with its traceback
    began, half = time.monotonic(), (arguments.times + 1) // 2
    reached: Counter[str] = Counter()
    broken: list[str] = []
    for part in (
        lambda folder: in_an_engine(folder, arguments.loads),
        lambda folder: run_server_faults(folder, list(SERVER_FAULTS), arguments.times, say),
        lambda folder: run_ends(folder, list(ENDS), half, say),
        lambda folder: run_command_faults(folder, COMMAND_FAULTS, half, say),
    ):
        with tempfile.TemporaryDirectory() as folder:
            counts, wrong = part(Path(folder))
        reached += counts
        broken += wrong
    with tempfile.TemporaryDirectory() as folder:
        overloaded = overload(Path(folder), arguments.overload)
    broken += [f"overload: {sentence}" for sentence in overloaded.pop("broken")]
    figures = {
        **header("faults"),
        "command": f"python -m tests.full.faults --loads {arguments.loads} --times {arguments.times} "
        f"--overload {arguments.overload:g}",
        "seconds": round(time.monotonic() - began),
        "kinds": len(reached),
        "faults": sum(reached.values()),
        "reached": dict(reached),
        "overload": overloaded,
        "broken": broken,
    }
    write(arguments.output, figures)
    say(json.dumps(overloaded))
    print(
        f"{figures['faults']} faults of {figures['kinds']} kinds, {len(broken)} broke an invariant", *broken, sep="\n"
    )
    return int(bool(broken))


def in_an_engine(folder: Path, loads: int) -> tuple[Counter[str], list[str]]:
    """Let calls of functions fail inside an engine with random loads, and return the faults that were reached.

    The second value lists the invariants that did not hold.
    """
    reached: Counter[str] = Counter()
    broken = []
    hashing = write_folder(folder / "hashing", hashing=1)
    manifest = read_manifest(hashing)
    backend = load_backend(hashing, manifest, BackendConfig(threads=1, kernels=False))
    model = (backend, manifest, Tokenizer(hashing / "tokenizer.json"))
    for name in FAULTS:
        for seed in range(loads):
            for call in CALLS:
                try:
                    reached[name] += check_fault(model, name, seed, call)
                except Exception as error:
                    broken.append(f"{name}, seed {seed}, call {call}: {error}")
        say(f"{reached[name]:6} {name}")
    return reached, broken


def say(text: str) -> None:
    """Report progress on stderr."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
