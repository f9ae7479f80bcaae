"""Check the library of a folder as `bench.gpu.first` does, on an interpreted GPU, with references computed before.

`python -m tests.full.cuda.compute_first FOLDER OTHER` writes references to the folder OTHER and prints the rows. The
last case is compared with the references of another case, so it must be wrong.
"""

import json
import sys
from pathlib import Path

import torch

from bench.gpu import first
from tests.full.cuda.compute_calls import Caller
from tests.full.cuda.computing import Device, Memory

SIZES = {"q_heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": torch.float16, "sequences": ((30, 1), (0, 20))}
CASES = (
    (first.PAGED, SIZES | {"normalizer": "ssa", "statistics": True}),
    (first.PAGED, SIZES | {"normalizer": "softmax", "statistics": True, "cache_dtype": torch.int8}),
    (first.CONTIGUOUS, {"normalizer": "relu", "form": "shared", "queries": 5, "new_keys": 5, "dtype": torch.float16}),
    (first.PAGED, SIZES | {"normalizer": "sigmoid", "statistics": True}),
)


def main() -> None:
    library, folder = map(Path, sys.argv[1:])
    first.CASES = (*CASES[:-1], CASES[0])
    first.save_references(folder)
    first.CASES = CASES
    with Memory() as memory:
        Device(memory)
        caller = Caller(library)
        rows = first.check(first.Context(folder, folder / "results.json", lambda: True), "cpu", caller)
        json.dump(list(rows), sys.stdout)


if __name__ == "__main__":
    main()
