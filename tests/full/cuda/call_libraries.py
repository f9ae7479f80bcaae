"""Call each op in every way that bench/gpu/library.py knows, with the fake driver as libcuda.

`python -m tests.full.cuda.call_libraries FOLDER` prints launches per op and way, with names of tensors in place of
addresses.
"""

import ctypes
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

from bench.gpu import library as gpu_library


def launches(events: list[str], addresses: dict[str, str]) -> list[str]:
    return [
        re.sub(r"=(\d{6,})", lambda found: "=" + addresses.get(found[1], "memory"), event)
        for event in events
        if not event.startswith(("kernel ", "shared "))
    ]


def main() -> None:
    caller = gpu_library.Caller(Path(sys.argv[1]))
    fake = ctypes.CDLL("libcuda.so.1")
    fake.fake_events.restype = ctypes.c_char_p
    common = {"dtype": torch.float16, "head_dim": 64}
    cases = (
        {"normalizer": "adaptive_softmax", "alibi": True, "statistics": True},
        {"normalizer": "entmax", "form": "shared", "queries": 6, "new_keys": 6},
    )
    said: dict[str, Any] = {}
    for op, case in zip(gpu_library.OPS, cases, strict=True):
        call = op.make_call(device="cpu", **common, **case)
        said[op.name] = {}
        for how in gpu_library.HOW:
            output, *_, stats = op.run(caller, call, how)
            tensors = {**call.tensors, "output": output, "stats": stats}
            addresses = {str(tensor.data_ptr()): name for name, tensor in tensors.items()}
            said[op.name][how] = launches(fake.fake_events().decode().splitlines(), addresses)
    said["rows"] = list(gpu_library.check_library(caller, True, "cpu"))
    json.dump(said, sys.stdout)


main()
