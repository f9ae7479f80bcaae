"""The compiled libraries on a GPU, without Triton: libsharp_cuda.so and TensorRT's plugins against float64.

python -m bench.gpu.library --kernels build/kernels [--target 90] [--quick]
cmake -S . -B build/gpu -DSHARP_CUDA=ON && cmake --build build/gpu --target sharp_trt sharp_plugin_call
python -m bench.gpu.library [--libraries build/gpu] [--quick] [--minutes 9] [--resume]

The first two commands need no GPU. They compile the kernels of the cases and no others. The third needs torch, this
tree and the folder of libraries. Plugins are called as TensorRT calls them, with caches updated in place and copied.
Cases whose kernels were not compiled are counted. The exit code is 1 if a result is wrong, or if nothing was compared.
When the time is over the command ends with the rows that it has, and --resume goes on behind them.
"""

import argparse
import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

import bench.gpu.source_tree  # noqa: F401 - makes sharp.plugins importable
from bench.gpu import attention, compilation, correctness, inputs
from bench.gpu.cases import DeviceLostError, check_device, failure
from bench.gpu.inputs import Call, to_numpy
from bench.gpu.problems import attention_problem, paged_attention_problem
from bench.gpu.run import merge_results, show
from sharp.core.errors import SharpError
from sharp.plugins.cuda.library import AttentionProblem, Library, Problem
from sharp.plugins.op.attributes import DEFAULT_STATS_COLUMNS
from sharp.plugins.triton.options import Options

RESULTS = Path(__file__).resolve().parents[1] / "results" / "gpu_library.json"
HOW = ("library", "plugin in place", "plugin copying")


def columns_of(call: Call) -> int:
    """Return the number of columns of a call's statistics, 4, or 5 with a sink."""
    columns: int = call.attributes.get("stats_columns", DEFAULT_STATS_COLUMNS)
    return columns


class Caller:
    """The libraries of a folder, through which calls are run; device memory is torch's."""

    def __init__(self, folder: Path) -> None:
        self.library = Library(folder / "libsharp_cuda.so")
        self.plugin = str(folder / "libsharp_trt.so").encode()
        if not (folder / "libsharp_plugin_call.so").exists():
            return  # then plugins cannot be called
        plugin_call = ctypes.CDLL(str(folder / "libsharp_plugin_call.so"))
        workspace = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t), ctypes.c_void_p]
        self.call_paged_attention = plugin_call.sharp_call_paged_attention
        self.call_paged_attention.argtypes = [ctypes.c_char_p, ctypes.POINTER(Problem), ctypes.c_void_p, *workspace]
        self.call_attention = plugin_call.sharp_call_attention
        self.call_attention.argtypes = [ctypes.c_char_p, ctypes.POINTER(AttentionProblem), *workspace]

    def paged_attention(self, call: Call, how: str) -> tuple[torch.Tensor, ...]:
        """Run PagedAttention and return output, caches, scales or screen, and stats.

        `how` is one of `HOW`. The call's own caches change, except for "plugin copying".

        Raises:
            SharpError: the library or the plugin failed, for example because it has no kernel for the call.
        """
        tensors = call.tensors
        query = tensors["query"]
        output = query.new_full((*query.shape[:2], tensors["value"].shape[2]), float("nan"))
        stats = query.new_full((*query.shape[:2], columns_of(call)), float("nan"), dtype=torch.float32)
        problem = paged_attention_problem(call, output, stats)
        caches = [tensors[name] for name in inputs.UPDATED if name in tensors]
        if how == "library":
            self.launch(problem, query)
            return output, *caches, stats
        if how == "plugin copying":
            caches = [torch.empty_like(cache) for cache in caches]
        addresses = (ctypes.c_void_p * len(caches))(*(cache.data_ptr() for cache in caches))
        self.enqueue(self.call_paged_attention, (self.plugin, ctypes.byref(problem), addresses), query)
        return output, *caches, stats

    def attention(self, call: Call, how: str) -> tuple[torch.Tensor, ...]:
        """Run op Attention and return output, presents and stats.

        `how` is one of `HOW`. A shared buffer is its own present and changes, except for "plugin copying".

        Raises:
            SharpError: the library or the plugin failed, for example because it has no kernel for the call.
        """
        tensors = call.tensors
        query, shared = tensors["query"], "past_lens" in tensors
        output = query.new_full((*query.shape[:3], tensors["value"].shape[3]), float("nan"))
        stats = query.new_full((*query.shape[:3], columns_of(call)), float("nan"), dtype=torch.float32)
        presents = []
        for name in ("key", "value"):
            fresh, past = tensors[name], tensors.get(f"past_{name}")
            places = fresh.shape[2] * (not shared) + (0 if past is None else past.shape[2])
            in_place = past is not None and shared and how != "plugin copying"
            presents.append(past if in_place else fresh.new_empty((*fresh.shape[:2], places, fresh.shape[3])))
        problem = attention_problem(call, output, (presents[0], presents[1]), stats)
        if how == "library":
            self.launch(problem, query)
        else:
            self.enqueue(self.call_attention, (self.plugin, ctypes.byref(problem)), query)
        return output, *presents, stats

    def launch(self, problem: Problem | AttentionProblem, query: torch.Tensor) -> None:
        """Launch a problem through the library, with memory on the device of the query."""
        workspace = self.memory(query, self.library.workspace_bytes(problem))
        run = self.library.paged_attention if isinstance(problem, Problem) else self.library.attention
        run(problem, workspace.data_ptr(), self.stream(query))  # type: ignore[arg-type]

    def enqueue(self, function: Any, arguments: tuple[Any, ...], query: torch.Tensor) -> None:
        """Call a plugin's function twice: for the size of its workspace, and to enqueue the work.

        `arguments` are the function's own, before workspace, size and stream. `query` says on which device the
        workspace is.

        Raises:
            SharpError: the plugin failed.
        """
        size, stream = ctypes.c_size_t(), self.stream(query)
        self.check(function(*arguments, None, ctypes.byref(size), stream))
        workspace = self.memory(query, size.value)
        self.check(function(*arguments, workspace.data_ptr(), ctypes.byref(size), stream))

    @staticmethod
    def stream(query: torch.Tensor) -> int:
        """Return the address of torch's current CUDA stream; 0 on a CPU."""
        return torch.cuda.current_stream().cuda_stream if query.is_cuda else 0

    @staticmethod
    def memory(like: torch.Tensor, size: int) -> torch.Tensor:
        """Return `size` bytes on the device of `like`, which torch keeps until the stream is through with them."""
        return torch.empty(size, dtype=torch.uint8, device=like.device)

    @staticmethod
    def check(status: int) -> None:
        """Check the status of a plugin's function.

        Raises:
            SharpError: the status is not 0.
        """
        if status:
            raise SharpError(f"the plugin failed at step {status} of plugin_call.cc; its words are on stderr")


class Op(NamedTuple):
    """An op as the benchmarks know it: its cases, its reference, and how it is run."""

    name: str
    cases: Callable[[bool], list[dict[str, Any]]]
    make_call: Callable[..., Call]
    expected: Callable[..., tuple[Any, ...]]
    compare: Callable[..., dict[str, Any]]
    run: Callable[[Caller, Call, str], tuple[torch.Tensor, ...]]

    def ways(self, case: dict[str, Any]) -> tuple[str, ...]:
        """Return the ways to call a case, by name; forms other than a shared buffer need a plugin that copies."""
        return HOW if case.get("form", "shared") == "shared" else ("library", "plugin copying")


OPS = (
    Op(
        "PagedAttention",
        correctness.small_cases,
        correctness.make_case,
        inputs.expected,
        correctness.compare,
        Caller.paged_attention,
    ),
    Op(
        "SharpAttention",
        attention.cases,
        attention.make_call,
        attention.expected,
        attention.compare,
        Caller.attention,
    ),
)


def check_library(caller: Caller, quick: bool, device: str = "cuda", done: int = 0) -> Iterator[dict[str, Any]]:
    """Yield a row for each op, case and way to call; `built` is false where the libraries lack the kernels.

    Rows have the `number` of their case; the first `done` cases are left out.
    """
    listed = [(op, case) for op in OPS for case in op.cases(quick)]
    for number, (op, case) in enumerate(listed[done:], done + 1):
        named = {"op": op.name, **{name: str(value).removeprefix("torch.") for name, value in case.items()}}
        for row in _check_case(caller, op, case, device):
            yield {"number": number, **named, **row}


def options_of_cases(quick: bool) -> list[Options]:
    """Return the options that the libraries must be compiled for."""
    options: dict[Options, None] = {}
    for op, options_of in zip(OPS, (compilation.options_of, attention.options_of), strict=True):
        for case in op.cases(quick):
            options.setdefault(replace(options_of(op.make_call(device="cpu", **case)), statistics=True))
    return list(options)


def compile_kernels(folder: Path, quick: bool, target: int) -> None:
    """Write the package of the cases' kernels for one compute capability, as `make kernels` does."""
    from sharp.plugins.cuda.build_kernels import compile_with_progress
    from sharp.plugins.cuda.kernel_set import kernels_for, plan_constants
    from sharp.plugins.cuda.package import write_package

    work = [(kernel, target) for kernel in kernels_for(options_of_cases(quick), target)]
    began = time.monotonic()
    images = compile_with_progress(work, folder / "cache", len(os.sched_getaffinity(0)))
    size = write_package(images, plan_constants(), folder)
    print(f"{folder}: {len(images)} kernels, {size / 1e6:.1f} MB, in {time.monotonic() - began:.0f} s")


def _check_case(caller: Caller, op: Op, case: dict[str, Any], device: str) -> Iterator[dict[str, Any]]:
    """Yield a row per way to run the case by the C++ library, with its errors; or that it has no such kernel."""
    call = op.make_call(device=device, **case)
    arrays = to_numpy(call.tensors)
    try:
        op.run(caller, call, HOW[0])
    except SharpError as error:
        if "has no kernel" in str(error):
            yield {"built": False}
            return
        # Another failure also meets every call below, whose rows report it.
    references = op.expected(arrays, call.normalizer, call.attributes)
    for how in op.ways(case):
        found: dict[str, Any]
        try:
            found = op.compare(
                op.make_call(device=device, **case), references, lambda call, how=how: op.run(caller, call, how)
            )
        except (RuntimeError, SharpError) as error:
            found = {**failure(error), "holds": False}
        yield {"how": how, "built": True, **found}
        check_device()


def earlier_rows(path: Path, device: str, quick: bool) -> tuple[list[dict[str, Any]], int]:
    """Return the rows of an earlier call's cases on such a device, without its last case, and the number of cases.

    The last case may be unfinished, so it is compared again.
    """
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    rows: list[dict[str, Any]] = (
        found.get("rows", []) if (found.get("device"), found.get("quick")) == (device, quick) else []
    )
    done = rows[-1].get("number", 1) - (not found["complete"]) if rows else 0
    return [row for row in rows if row.get("number", 0) <= done], done


def main() -> int:
    """Compare the compiled GPU libraries with float64, print the rows and write them to --output.

    Return 1 if a result is wrong or there is none, 2 without a GPU, otherwise 0.
    """
    parser = argparse.ArgumentParser(description="The compiled GPU libraries against float64.")
    parser.add_argument("--libraries", type=Path, default=Path("build/gpu"), help="folder of the three libraries")
    parser.add_argument("--quick", action="store_true", help="fewer cases")
    parser.add_argument("--output", type=Path, default=RESULTS, help="results file")
    parser.add_argument("--minutes", type=float, default=9.0, help="time after which no row is begun")
    parser.add_argument("--resume", action="store_true", help="go on behind the rows that the results file has")
    parser.add_argument("--kernels", type=Path, help="compile the cases' kernels into this folder, and no more")
    parser.add_argument("--target", type=int, default=90, help="compute capability of --kernels")
    chosen = parser.parse_args()
    if chosen.kernels is not None:
        compile_kernels(chosen.kernels, chosen.quick, chosen.target)
        return 0
    if not torch.cuda.is_available():
        print("bench.gpu.library: torch finds no CUDA device; run it on a machine with an NVIDIA GPU", file=sys.stderr)
        return 2
    torch.cuda.init()
    torch.zeros(1, device="cuda")  # makes torch's context current, because the library launches in it
    machine = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    rows, done = earlier_rows(chosen.output, machine["device"], chosen.quick) if chosen.resume else ([], 0)
    end = time.monotonic() + 60 * chosen.minutes
    try:
        for row in check_library(Caller(chosen.libraries), chosen.quick, done=done):
            if time.monotonic() > end and rows and row["number"] != rows[-1]["number"]:
                print(f"stopped: {chosen.minutes:g} minutes are over")
                break
            rows.append(row)
            print(show(row), flush=True)
            merge_results(chosen.output, {**machine, "quick": chosen.quick, "complete": False, "rows": rows})
        else:
            merge_results(chosen.output, {"complete": True})
    except DeviceLostError as error:
        print(f"the GPU takes no more work from this process: {error}")
    compared = [row for row in rows if row["built"]]
    wrong = sum(not row["holds"] for row in compared)
    print(
        f"{len(compared)} results compared, {wrong} wrong; {len(rows) - len(compared)} cases without compiled kernels"
    )
    return 1 if wrong or not compared else 0


if __name__ == "__main__":
    sys.exit(main())
