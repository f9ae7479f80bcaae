"""Compute cases of bench/gpu/library.py on an interpreted GPU, with memory accesses checked as in tests/full/triton.

`python -m tests.full.cuda.compute_calls FOLDER` reads cases as JSON from stdin and prints the rows of each. The first
case of an op and a kind of cache is called in every way, the others only through the library.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from bench.gpu import library as gpu_library
from tests.full.cuda.computing import Device, Memory


class Caller(gpu_library.Caller):
    """A caller whose scratch memory holds NaN at first."""

    @staticmethod
    def memory(like: torch.Tensor, size: int) -> torch.Tensor:
        return torch.full((size,), 255, dtype=torch.uint8)


def rows(
    caller: Caller, op: gpu_library.Op, case: dict[str, Any], device: Device, every_way: bool
) -> list[dict[str, Any]]:
    """Return a row for each way to call the op: its errors, launches and failures."""
    case = {name: getattr(torch, value) if "dtype" in name else value for name, value in case.items()}
    call = op.make_call(device="cpu", **case)
    references = op.expected(gpu_library.to_numpy(call.tensors), call.normalizer, call.attributes)
    found = []
    for how in op.ways(case)[: None if every_way else 1]:
        call = op.make_call(device="cpu", **case)
        row = op.compare(call, references, lambda call, how=how: op.run(caller, call, how))
        found.append({"how": how, **row, "launches": device.launches, "failures": device.failures})
        device.launches, device.failures = [], []
    return found


def main() -> None:
    caller = Caller(Path(sys.argv[1]))
    ops = {op.name: op for op in gpu_library.OPS}
    found, called = [], set()
    with Memory() as memory:
        device = Device(memory)
        for name, case in json.load(sys.stdin):
            kind = name, case.get("cache_dtype"), case.get("screened")
            found.append(rows(caller, ops[name], case, device, kind not in called))
            called.add(kind)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
