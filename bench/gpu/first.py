"""The first call on a GPU: the figures that decide, in eight minutes, over kernels that were compiled before.

python -m bench.gpu.first --prepare       # without a GPU: compile the kernels, build the library, compute references
python -m bench.gpu.first --dry-run       # print the plan, its seconds and what must be carried; 1 if it does not fit
python -m bench.gpu.first --output FILE   # on the GPU

The library is the compiled one, so no result but those of the last step needs Triton's compiler. Each step has seconds
of its own and writes its rows as they come. A wrong row or an error is a row, and the steps behind it run all the same.
The exit code is 1 if a result is wrong or a case failed, and 2 without a GPU.
"""

import argparse
import ctypes
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import bench.gpu.source_tree  # noqa: F401 - makes sharp.plugins importable
from bench.gpu import attention, compilation, correctness, speed
from bench.gpu.cases import Cases, DeviceLostError, check_device, failure
from bench.gpu.inputs import Call, expected, expected_row, make_call, to_numpy
from bench.gpu.library import Caller, Op, columns_of
from bench.gpu.problems import paged_attention_problem
from bench.gpu.run import merge_results, show
from sharp.plugins.cuda.library import Library
from sharp.plugins.op.attributes import NORMALIZERS
from sharp.plugins.triton.options import Options

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "gpu-first"
LIBRARY, REFERENCES, KERNELS = "libsharp_cuda.so", "references.pt", "kernels"
MOST_BYTES = 64 << 20  # of the tree and the folder, compressed or not
LEFT_OUT = ("models/checkpoints",)  # not needed by any step
TARGET = 90
MIXED = {"sequences": ((200, 1), (0, 40), (77, 3)), "q_heads": 8, "kv_heads": 2, "statistics": True}
LONG = ((131_071, 1), (60_000, 1))
ROWS = 12  # rows of a long call that are compared
DECODE = ("softmax", "ssa", "adaptive_softmax", "entmax", *speed.SCALED)
CONTEXTS, BATCHES, PROMPTS = (32_768, 131_072), (1, 8, 32), (8192, 32_768)
PEERS = (*speed.SDPA_BACKENDS, "AdaSplash")
PAGED = Op("PagedAttention", lambda _: [], make_call, expected, correctness.compare, Caller.paged_attention)
CONTIGUOUS = Op(
    "SharpAttention", lambda _: [], attention.make_call, attention.expected, attention.compare, Caller.attention
)
# Every normalizer, three types, 8-bit caches, groups of 1, 4 and 8 query heads, and the other op.
CASES: tuple[tuple[Op, dict[str, Any]], ...] = (
    *((PAGED, MIXED | {"normalizer": name}) for name in NORMALIZERS),
    (PAGED, MIXED | {"normalizer": "softmax", "dtype": torch.float16, "kv_heads": 8}),
    (PAGED, MIXED | {"normalizer": "softmax", "dtype": torch.float32, "kv_heads": 1}),
    *((PAGED, MIXED | {"normalizer": "softmax", "cache_dtype": kind}) for kind in speed.SCALED.values()),
    *((CONTIGUOUS, {"normalizer": name, "form": "shared", "queries": 5, "new_keys": 5}) for name in ("ssa", "entmax")),
)


class Context(NamedTuple):
    """The folder of what was prepared, the results file, and whether the time of the step that gets it is left."""

    folder: Path
    output: Path
    timely: Callable[[], bool]


Rows = Iterator[dict[str, Any]]


@dataclass(frozen=True)
class Step:
    """A step of the plan: its name, what it shows, its seconds, and the function that yields its rows."""

    name: str
    shows: str
    seconds: int
    rows: Callable[[Context], Rows]


def machine(context: Context) -> Rows:
    """Yield copy bandwidth and matrix products a second."""
    yield from speed.machine(Cases(context.timely))


def check(context: Context, device: str = "cuda", caller: Caller | None = None) -> Rows:
    """Yield a row for each case of `CASES` with the errors of the library against references computed before."""
    caller = caller or Caller(context.folder)
    saved = torch.load(context.folder / REFERENCES, weights_only=True)
    for (op, case), kept in zip(CASES, saved, strict=True):
        if not context.timely():
            return
        named = {"op": op.name, **{key: str(value) for key, value in case.items() if key != "sequences"}}
        tensors = {name: tensor.to(device) for name, tensor in kept["tensors"].items()}
        references = tuple((part.float() if part.is_floating_point() else part).numpy() for part in kept["expected"])
        call = Call(case["normalizer"], tensors, kept["attributes"])
        yield named | _caught(partial(_compare, caller, op, call, references))


def _compare(caller: Caller, op: Op, call: Call, references: tuple[Any, ...]) -> dict[str, Any]:
    """Return the errors of a call by the C++ library against `references`, as the op's `compare` does."""
    return op.compare(call, references, lambda call: op.run(caller, call, "library"))


def check_long(context: Context) -> Rows:
    """Yield a row for each of four normalizers: errors over 131,072 keys, and whether a CUDA graph has those bits."""
    caller = Caller(context.folder)
    for normalizer in speed.PREFILL:
        if not context.timely():
            return
        yield {"normalizer": normalizer, "sequences": "131,072 and 60,000"} | _caught(
            partial(_long_case, caller, normalizer)
        )


def _long_case(caller: Caller, normalizer: str) -> dict[str, Any]:
    """Return the errors of random rows of a call over a long context, and whether a CUDA graph repeats the bits."""
    call = make_call(normalizer, LONG, statistics=True, spread=2.0)
    launch, output, stats = launcher(caller, call)
    launch()
    first = output.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    output.zero_()
    graph.replay()
    torch.cuda.synchronize()
    error = size = entropy = 0.0
    for row in range(ROWS):
        token, head = row % 2, row * 5 % speed.HEADS
        reference, statistics = expected_row(call, token, head)
        found = output[token, head].double().cpu().numpy()
        error, size = error + float(((found - reference) ** 2).sum()), size + float((reference**2).sum())
        entropy = max(entropy, abs(float(stats[token, head, 0]) - statistics[0]))
    same = torch.equal(first, output)
    relative = (error / size) ** 0.5
    limits = correctness.TOLERANCES[torch.bfloat16], correctness.entropy_limit(call)
    return {
        "output": relative,
        "entropy": entropy,
        "graph_has_the_same_bits": same,
        "holds": relative <= limits[0] and entropy <= limits[1] and same,
    }


def launcher(caller: Caller, call: Call) -> tuple[Callable[[], None], torch.Tensor, torch.Tensor]:
    """Return a function that launches a call of PagedAttention on torch's current stream, and its output and stats."""
    query, value = call.tensors["query"], call.tensors["value"]
    output = query.new_empty((*query.shape[:2], value.shape[2]))
    stats = query.new_empty((*query.shape[:2], columns_of(call)), dtype=torch.float32)
    problem = paged_attention_problem(call, output, stats)
    workspace = caller.memory(query, caller.library.workspace_bytes(problem))

    def launch() -> None:
        """Enqueue the call."""
        caller.library.paged_attention(problem, workspace.data_ptr(), caller.stream(query))

    return launch, output, stats


def decode(context: Context) -> Rows:
    """Yield microseconds a layer of a token for each sequence, and bytes of keys and values read a second."""
    caller = Caller(context.folder)
    for keys in CONTEXTS:
        for batch in BATCHES:
            for name in DECODE:
                # A cache of 8 bits is made from one in float32, which must fit, too.
                most = speed.MOST_BYTES // (4 if name in speed.SCALED else 1)
                if context.timely() and speed.cache_bytes(batch, keys) <= most:
                    named = {"subject": name, "batch": batch, "context": keys}
                    yield named | _caught(partial(_time_decode, caller, name, batch, keys))


def _time_decode(caller: Caller, name: str, batch: int, keys: int) -> dict[str, Any]:
    """Return the time per layer of a decode step by the C++ library: `batch` sequences of `keys` tokens."""
    layers = max(1, min(8, speed.COLD_BYTES // speed.cache_bytes(batch, keys)))
    normalizer, kind = ("softmax", speed.SCALED[name]) if name in speed.SCALED else (name, None)
    launches = [
        launcher(
            caller,
            make_call(normalizer, ((keys - 1, 1),) * batch, spread=speed.SPREAD, seed=layer, cache_dtype=kind),
        )[0]
        for layer in range(layers)
    ]

    def step() -> None:
        """Enqueue the calls of all layers."""
        for launch in launches:
            launch()

    timing = speed.time_call(step)
    read = speed.cache_bytes(batch, keys) / speed.OTHER_DECODE.get(name, 1)
    return {
        "microseconds_per_layer": timing.median / layers * 1e3,
        "cache_gb_per_second": read / (timing.median / layers) / 1e6,
        "spread": timing.spread,
    }


def prefill(context: Context) -> Rows:
    """Yield milliseconds and operations a second of a prompt's causal half, of Sharp's library and of its peers."""
    caller = Caller(context.folder)
    for length in PROMPTS:
        for name in (*speed.PREFILL, *PEERS):
            if context.timely():
                yield {"subject": name, "length": length} | _caught(partial(_time_prefill, caller, name, length))


def _time_prefill(caller: Caller, name: str, length: int) -> dict[str, Any]:
    """Return milliseconds and TFLOP/s of a causal prompt of `length` tokens for subject `name`."""
    if name in speed.SDPA_BACKENDS:
        timing = speed.time_call(speed.sdpa_prefill(length, speed.SDPA_BACKENDS[name]))
    elif name == "AdaSplash":
        timing = speed.time_call(speed.adasplash_prefill(length), graph=False)
    else:
        timing = speed.time_call(launcher(caller, make_call(name, ((0, length),), spread=speed.SPREAD))[0])
    return {
        "milliseconds": timing.median,
        "tflops": 2 * length * (length + 1) * speed.HEADS * speed.HEAD_DIM / timing.median / 1e9,
        "spread": timing.spread,
    }


def just_in_time(context: Context) -> Rows:
    """Run the quick cases of `bench.gpu.run` in a process of its own, and yield its code and its last words."""
    if not context.timely():
        return
    minutes = STEPS[-1].seconds / 60 - 0.5
    command = [sys.executable, "-m", "bench.gpu.run", "--quick", "--only", "correctness", "--minutes", f"{minutes:.2f}"]
    output = context.output.with_name("gpu_just_in_time.json")
    finished = subprocess.run([*command, "--output", str(output)], capture_output=True, text=True, check=False)
    yield {"code": finished.returncode, "said": finished.stdout[-2000:], "holds": finished.returncode == 0}


STEPS = (
    Step("machine", "copy bandwidth and a matrix product", 25, machine),
    Step("correctness", f"{len(CASES)} cases of the compiled library against float64", 40, check),
    Step("long", "131,072 keys, and a CUDA graph against none", 20, check_long),
    Step("decode", "one token at 32k and 131k, batch 1, 8 and 32", 130, decode),
    Step("prefill", "prompts of 8k and 32k beside cuDNN, flash attention and AdaSplash", 85, prefill),
    Step("just-in-time", "the quick cases through Triton's compiler", 170, just_in_time),
)


def _caught(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the row of a case, or one with its error.

    Raises:
        DeviceLostError: the GPU takes no more work from this process.
    """
    try:
        return work()
    except Exception as error:  # of any kind: only the results file is left of a lent machine
        return {**failure(error), "holds": False}
    finally:
        check_device()


def options_of_plan() -> list[Options]:
    """Return the options that the library must be compiled for."""
    of_op = {"PagedAttention": compilation.options_of, "SharpAttention": attention.options_of}
    found = [of_op[op.name](op.make_call(device="cpu", **_short(case))) for op, case in CASES]
    return list(dict.fromkeys(replace(options, statistics=True) for options in found))


def _short(case: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a case with one sequence of one token, if it has sequences."""
    return {**case, "sequences": ((1, 1),)} if "sequences" in case else case


def prepare(folder: Path) -> None:
    """Compile the kernels of the plan for `TARGET`, build the library over them, and compute the references."""
    from sharp.plugins.cuda.build_kernels import compile_with_progress
    from sharp.plugins.cuda.kernel_set import kernels_for, plan_constants
    from sharp.plugins.cuda.package import write_package

    work = [(kernel, TARGET) for kernel in kernels_for(options_of_plan(), TARGET)]
    images = compile_with_progress(work, ROOT / "build" / "kernels" / "cache", len(os.sched_getaffinity(0)))
    write_package(images, plan_constants(), folder / KERNELS)
    build(folder)
    save_references(folder)
    print(f"{folder}: {len(images)} kernels for sm_{TARGET}, {size_of(folder) / 1e6:.1f} MB")


def save_references(folder: Path) -> None:
    """Compute `CASES` in float64, and write their inputs and outputs to `folder`."""
    saved = []
    for op, case in CASES:
        call = op.make_call(device="cpu", **case)
        references = op.expected(to_numpy(call.tensors), call.normalizer, call.attributes)
        saved.append(
            {
                "tensors": call.tensors,
                "attributes": call.attributes,
                "expected": [_small(torch.as_tensor(reference), call) for reference in references],
            }
        )
    torch.save(saved, folder / REFERENCES)


def _small(reference: torch.Tensor, call: Call) -> torch.Tensor:
    """Return a reference in the type of the call's query if that has the same numbers, as for caches; else float32."""
    if not reference.is_floating_point():
        return reference
    narrow = reference.to(call.tensors["query"].dtype)
    return narrow if torch.equal(narrow.to(reference.dtype), reference) else reference.float()


def build(folder: Path) -> None:
    """Compile the library in `folder` over its kernels, in seconds, with g++ and the headers of a toolkit or of Triton.

    Raises:
        CalledProcessError: g++ failed.
    """
    import triton

    table = folder / KERNELS / "kernels.cc"
    text = table.read_text(encoding="utf-8")
    images = f'".incbin \\"{(folder / KERNELS / "kernels.bin").resolve()}\\"\\n"'
    lines = [f"    {images}" if ".incbin" in line else line for line in text.splitlines()]
    table.write_text("\n".join(lines) + "\n", encoding="utf-8")
    headers = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    sources = [*(ROOT / "plugins" / "cuda").glob("*.cc"), ROOT / "plugins" / "op" / "check.cc", table]
    includes = [f"-I{path}" for path in (ROOT / "plugins" / "cuda", ROOT / "plugins" / "op", headers)]
    command = ["g++", "-std=c++17", "-O1", "-fPIC", "-shared", *includes, *map(str, sources)]
    subprocess.run([*command, "-ldl", "-o", str(folder / LIBRARY)], check=True)


def size_of(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def carried() -> int:
    """Return the bytes of what another machine needs: tracked files without `LEFT_OUT`, and `FOLDER`."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = [name for name in listed.split("\0") if name and not name.startswith(LEFT_OUT)]
    return sum((ROOT / name).lstat().st_size for name in names) + size_of(FOLDER)


def dry_run(seconds: float) -> int:
    """Print the plan with its seconds and sizes; return 1 if it does not fit, or if something is not prepared."""
    for step in STEPS:
        print(f"  {step.name:12} {step.seconds:4} s  {step.shows}")
    total, size = sum(step.seconds for step in STEPS), carried()
    lacking = [name for name in (LIBRARY, REFERENCES, KERNELS) if not (FOLDER / name).exists()]
    print(f"{total} of {seconds:g} s; {size / 2**20:.1f} of {MOST_BYTES >> 20} MiB without {', '.join(LEFT_OUT)}")
    if lacking:
        print(f"{FOLDER} has no {', '.join(lacking)}; make them with: python -m bench.gpu.first --prepare")
    return int(total > seconds or size > MOST_BYTES or bool(lacking))


def loadable(folder: Path) -> None:
    """Compile the library again where the one in `folder` does not load, as on a machine with an older C library."""
    try:
        ctypes.CDLL(str(folder / LIBRARY))
    except OSError as error:
        print(f"{error}; compiling it here", flush=True)
        build(folder)
    Library(folder / LIBRARY)


def main() -> int:
    """Prepare, print or do the plan; return 1 if something is wrong, 2 without a GPU, otherwise 0."""
    parser = argparse.ArgumentParser(description="The first call on a GPU: the figures that decide, in eight minutes.")
    parser.add_argument("--prepare", action="store_true", help="without a GPU: kernels, library and references")
    parser.add_argument("--dry-run", action="store_true", help="print the plan, its seconds and sizes")
    parser.add_argument("--minutes", type=float, default=8.0, help="time after which nothing is begun")
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results" / "gpu_first.json", help="results")
    chosen = parser.parse_args()
    if chosen.prepare:
        if shutil.which("g++") is None:
            parser.error("--prepare needs g++")
        prepare(FOLDER)
        return 0
    if chosen.dry_run:
        return dry_run(60 * chosen.minutes)
    if not torch.cuda.is_available():
        print("bench.gpu.first: torch finds no CUDA device; run it on a machine with an NVIDIA GPU", file=sys.stderr)
        return 2
    torch.zeros(1, device="cuda")  # makes torch's context current, because the library launches in it
    loadable(FOLDER)
    header = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    merge_results(chosen.output, header | {"date": datetime.now(UTC).isoformat(timespec="seconds")})
    return perform(STEPS, FOLDER, chosen.output, 60 * chosen.minutes)


def perform(steps: tuple[Step, ...], folder: Path, output: Path, seconds: float) -> int:
    """Do the steps in order, each in its own seconds, and write every row at once; return 1 if a row is wrong."""
    end, wrong = time.monotonic() + seconds, 0
    for step in steps:
        began = time.monotonic()
        last = min(end, began + step.seconds)
        print(f"{step.name}: {step.shows}", flush=True)
        rows: list[dict[str, Any]] = []
        try:
            for row in step.rows(Context(folder, output, lambda last=last: time.monotonic() < last)):
                rows.append(row)
                wrong += row.get("holds") is False or "error" in row
                print(show(row), flush=True)
                merge_results(output, {step.name: {"rows": rows}})
        except DeviceLostError as error:
            print(f"the GPU takes no more work from this process: {error}")
            return 1
        merge_results(output, {step.name: {"rows": rows, "seconds": time.monotonic() - began}})
    print(f"{wrong} wrong results or errors; written to {output}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
