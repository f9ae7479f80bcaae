"""Sample with the library's kernel on an interpreted GPU.

`python -m tests.full.cuda.compute_sampling LIBRARY` reads calls as JSON from stdin, each [logits, indices, samplings,
parts of changes]. It prints the tokens of the GPU and of the CPU's sampler, launches and failures.
"""

import json
import sys
from pathlib import Path

import numpy as np

from sharp.plugins.cpu.sampling import CHANGE, Changes, sample
from sharp.plugins.cuda.library import Library
from sharp.plugins.cuda.sampler import DeviceSampler
from tests.full.cuda.computing import Device


def main() -> None:
    device, library, found = Device(), Library(Path(sys.argv[1])), []
    calls = json.load(sys.stdin)
    sampler = DeviceSampler(library, len(calls[0][0][0]), 0)
    for given, indices, parameters, parts in calls:
        logits, rows, samplings = np.array(given, np.float32), np.array(indices), np.array(parameters, float)
        changes = Changes.of([np.array([*map(tuple, part)], CHANGE) for part in parts]) if parts else None
        of_rows = logits[rows]
        tokens = sampler.sample(logits.ctypes.data, rows, samplings, changes)
        if changes is not None:
            changes.apply(of_rows)
        found.append({"gpu": tokens.tolist(), "cpu": sample(of_rows, samplings).tolist()})
    json.dump({"calls": found, "launches": device.launches, "failures": device.failures}, sys.stdout)


if __name__ == "__main__":
    main()
