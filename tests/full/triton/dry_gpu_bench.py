"""Every section of `bench/gpu/run.py` that measures time, with the CPU and Triton's interpreter in place of a GPU.

`python -m tests.full.triton.dry_gpu_bench` prints a line of JSON per row, with the launched kernels that
`compilation.py` would not have compiled before. The times are those of a fake clock.
"""

import contextlib
import itertools
import json
from typing import Any
from unittest import mock

from tests.full.triton import interpreted

interpreted.start()

import torch  # noqa: E402 - after interpreted.start()
from torch.overrides import TorchFunctionMode  # noqa: E402

CLOCK = itertools.count(1)


class OnCpu(TorchFunctionMode):
    """A mode of torch that makes tensors on the CPU where "cuda" is requested."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


class Event:
    """A stand-in for CUDA's event: between two events lies one millisecond."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at = 0

    def record(self) -> None:
        self.at = next(CLOCK)

    def synchronize(self) -> None:
        assert self.at

    def elapsed_time(self, later: "Event") -> float:
        return float(later.at - self.at)


class Graph:
    """A stand-in for CUDA's graph, which replays nothing."""

    def replay(self) -> None:
        pass


def launched(kernel: Any) -> str:
    """Return a text that differs between kernels that are compiled separately."""
    return f"{kernel.name} {kernel.constants} {kernel.signature} {kernel.warps} warps {kernel.stages} stages"


def main() -> None:
    generator = torch.Generator
    cuda = {
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": lambda _: contextlib.nullcontext(),
        "synchronize": lambda: None,
        "get_device_capability": lambda: (9, 0),
    }
    from bench.gpu import cases as gpu_cases
    from bench.gpu import inputs, sampling, shapes, speed, tiles
    from sharp.plugins.triton import launch_plan, launching

    sizes = {
        "CONTEXTS": (40,),
        "PROMPTS": (24,),
        "BATCHES": (2,),
        "QUESTION": (40, 6),
        "HEADS": 4,
        "KV_HEADS": 2,
        "HEAD_DIM": 16,
    }
    sizes |= {"QUESTION": (40, 6), "COLD_BYTES": 1 << 15, "SAMPLE_MILLISECONDS": 1.0}
    small = {"q_heads": 4, "kv_heads": 2, "head_dim": 16, "device": "cpu"}

    def make_call(normalizer: str, sequences: tuple[tuple[int, int], ...], **options: Any) -> Any:
        short = tuple((min(context, 40), min(new, 24)) for context, new in sequences[:2])
        return inputs.make_call(normalizer, short, **{**options, **small})

    with contextlib.ExitStack() as patches:
        for name, fake in cuda.items():
            patches.enter_context(mock.patch.object(torch.cuda, name, fake))
        patches.enter_context(mock.patch.object(torch, "Generator", lambda _="cpu": generator("cpu")))
        for name, size in sizes.items():
            patches.enter_context(mock.patch.object(speed, name, size))
        patches.enter_context(mock.patch.object(launch_plan, "PART_KEYS", 16))
        few = {
            speed: {"DECODE": ("ssa", "entmax"), "PREFILL": ("entmax",), "QUESTIONS": ("softmax",)},
            sampling: {"VOCABULARIES": (257,), "ROWS": (1, 3)},
            tiles: {"NORMALIZERS": ("entmax",)},
            shapes: {"NORMALIZERS": ("softmax", "entmax"), "BATCHES": dict([*shapes.BATCHES.items()][-2:])},
        }
        for module, names in few.items():
            for name, values in names.items():
                patches.enter_context(mock.patch.object(module, name, values))
        for phase, (sequences, tried) in tiles.CASES.items():
            patches.enter_context(mock.patch.dict(tiles.CASES, {phase: (sequences, tried[:1])}))
        for module in (speed, shapes, tiles):
            patches.enter_context(mock.patch.object(module, "make_call", make_call))
        seen: set[str] = set()
        launch = launching.launch

        def noted(kernel: Any, *rest: Any) -> None:
            seen.add(launched(kernel))
            launch(kernel, *rest)

        patches.enter_context(mock.patch.object(launching, "launch", noted))
        patches.enter_context(OnCpu())
        cases = gpu_cases.Cases(lambda: True)
        for section, jobs, rows in (
            ("decode", speed.jobs("decode"), speed.decode(False, cases)),
            ("shapes", shapes.jobs(), shapes.shapes(False, cases)),
            ("prefill", speed.jobs("prefill"), speed.prefill(False, cases)),
            ("statistics", speed.jobs("statistics"), speed.statistics_cost(cases)),
            ("sampling", [], sampling.sampling(False, cases)),
            ("tiles", tiles.jobs(), tiles.tiles(cases)),
        ):
            ahead = {launched(kernel) for job in jobs for kernel in job.kernels(90)}
            for row in rows:
                print(json.dumps({"section": section, **row, "late": sorted(seen - ahead)}), flush=True)
                seen.clear()


if __name__ == "__main__":
    main()
