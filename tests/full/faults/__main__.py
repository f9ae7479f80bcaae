"""`python -m tests.full.faults --output FILE`: many faults of every kind, and what was lost by them."""

import argparse
import logging
import sys
import tempfile
from pathlib import Path

from bench.result_file import header, write
from sharp.plugins.manifest import read_manifest
from sharp.serving.backends import load_backend
from sharp.serving.config import BackendConfig
from sharp.serving.text.tokenizer import Tokenizer
from tests.full.faults.injection import FAULTS, check_fault
from tests.serving.conftest import write_folder

CALLS = (1, 2, 3, 5, 8, 13, 21, 34, 55, 89)


def main() -> int:
    """Inject the faults; the exit code is 1 if an invariant broke."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loads", type=int, default=20, help="random loads for every kind and call [default: 20]")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)  # every fault is logged with its traceback
    reached, broken = {}, []
    with tempfile.TemporaryDirectory() as folder:
        hashing = write_folder(Path(folder) / "hashing", hashing=1)
        manifest = read_manifest(hashing)
        backend = load_backend(hashing, manifest, BackendConfig(threads=1, kernels=False))
        model = (backend, manifest, Tokenizer(hashing / "tokenizer.json"))
        for name in FAULTS:
            reached[name] = 0
            for seed in range(arguments.loads):
                for call in CALLS:
                    try:
                        reached[name] += check_fault(model, name, seed, call)
                    except Exception as error:
                        broken.append(f"{name}, seed {seed}, call {call}: {error}")
            print(f"{reached[name]:6} {name}", file=sys.stderr)
    figures = {
        **header("faults"),
        "command": f"python -m tests.full.faults --loads {arguments.loads}",
        "kinds": len(FAULTS),
        "faults": sum(reached.values()),
        "reached": reached,
        "broken": broken,
    }
    write(arguments.output, figures)
    print(f"{figures['faults']} faults of {figures['kinds']} kinds, {len(broken)} broke an invariant")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
