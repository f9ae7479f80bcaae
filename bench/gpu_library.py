"""The compiled libraries on a GPU, without Triton: libsharp_cuda.so and TensorRT's plugin against float64.

make kernels KERNELS="--target 90 --op PagedAttention --head-dim 64 --head-dim 128"
cmake -S . -B build/gpu -DSHARP_CUDA=ON && cmake --build build/gpu --target sharp_trt sharp_plugin_call
python bench/gpu_library.py [--libraries build/gpu] [--quick]

The first two need no GPU; the third needs torch, this tree and the folder of libraries. The plugin is called as
TensorRT calls it, with its caches in place and copied. Cases whose kernels were not compiled are counted. The exit code
is 1 where a result is wrong, and where nothing was compared.
"""

import argparse
import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu_tree  # noqa: F401 - makes sharp.plugins importable
import torch
from gpu import merge_results, show
from gpu_cases import DeviceLostError, check_device, failure
from gpu_correctness import HEADS, MIXED, compare, holds, small_cases
from gpu_inputs import Call, expected, make_call, to_numpy

from sharp.plugins.cuda.library import TYPES, Attributes, Library, Problem, normalizer_number
from sharp.plugins.errors import SharpError
from sharp.plugins.ops.attributes import DEFAULT_ALPHA, DEFAULT_ENTROPY_THRESHOLD, ICML2025_COEFFICIENTS

RESULTS = Path(__file__).resolve().parent / "results" / "gpu_library.json"
HOW = ("library", "plugin in place", "plugin copying")


def problem_of(call: Call, output: torch.Tensor, stats: torch.Tensor) -> Problem:
    """The call as the library's structure; the tensors must live as long as it is used."""
    tensors, options = call.tensors, call.attributes
    coefficients = options.get("temperature_coefficients", ICML2025_COEFFICIENTS)
    attributes = Attributes(
        normalizer=normalizer_number(call.normalizer),
        scale=options["scale"],
        alpha=options.get("alpha", DEFAULT_ALPHA),
        temperature_coefficients=tuple(coefficients),
        temperature_terms=len(coefficients),
        entropy_threshold=options.get("entropy_threshold", DEFAULT_ENTROPY_THRESHOLD),
        softcap=options.get("softcap", 0.0),
        window=options.get("window", -1),
        causal=int(options.get("causal", True)),
    )
    tokens, q_heads, head_dim = tensors["query"].shape
    blocks, kv_heads, block_size, value_dim = tensors["value_cache"].shape
    sequences, max_blocks = tensors["block_table"].shape
    return Problem(
        attributes=attributes,
        tokens=tokens,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        blocks=blocks,
        block_size=block_size,
        sequences=sequences,
        max_blocks=max_blocks,
        type=TYPES.index(str(tensors["query"].dtype).removeprefix("torch.")),
        cache_type=TYPES.index(str(tensors["key_cache"].dtype).removeprefix("torch.")),
        head_params_width=tensors["head_params"].shape[1],
        alibi="alibi_slopes" in tensors,
        **{name: tensor.data_ptr() for name, tensor in tensors.items()},
        output=output.data_ptr(),
        stats=stats.data_ptr(),
    )


class Caller:
    """Runs calls through the libraries of a folder; device memory is torch's."""

    def __init__(self, folder: Path) -> None:
        self.library = Library(folder / "libsharp_cuda.so")
        self.plugin = str(folder / "libsharp_trt.so").encode()
        self.plugin_call = ctypes.CDLL(str(folder / "libsharp_plugin_call.so")).sharp_plugin_call
        self.plugin_call.argtypes = [ctypes.c_char_p, ctypes.POINTER(Problem), *[ctypes.c_void_p] * 3]
        self.plugin_call.argtypes += [ctypes.POINTER(ctypes.c_size_t), ctypes.c_void_p]

    def run(self, call: Call, how: str) -> tuple[torch.Tensor, ...]:
        """Output, caches and stats; under "plugin copying" the call's own caches stay as they are."""
        tensors = call.tensors
        query = tensors["query"]
        output = query.new_full((*query.shape[:2], tensors["value"].shape[2]), float("nan"))
        stats = query.new_full((*query.shape[:2], 4), float("nan"), dtype=torch.float32)
        problem = problem_of(call, output, stats)
        stream = torch.cuda.current_stream().cuda_stream if query.is_cuda else 0
        caches = [tensors["key_cache"], tensors["value_cache"]]
        if how == "library":
            workspace = self.memory(query, self.library.workspace_bytes(problem))
            self.library.paged_attention(problem, workspace.data_ptr(), stream)
            return output, *caches, stats
        if how == "plugin copying":
            caches = [torch.empty_like(cache) for cache in caches]
        size = ctypes.c_size_t()
        common = [self.plugin, ctypes.byref(problem), *(cache.data_ptr() for cache in caches)]
        self.check(self.plugin_call(*common, None, ctypes.byref(size), stream))
        workspace = self.memory(query, size.value)
        self.check(self.plugin_call(*common, workspace.data_ptr(), ctypes.byref(size), stream))
        return output, *caches, stats

    @staticmethod
    def memory(like: torch.Tensor, size: int) -> torch.Tensor:
        """Device memory; torch keeps it until the stream is through with it."""
        return torch.empty(size, dtype=torch.uint8, device=like.device)

    @staticmethod
    def check(status: int) -> None:
        """Raise SharpError unless the status is 0."""
        if status:
            raise SharpError(f"the plugin failed at step {status} of plugin_call.cc; its words are on stderr")


def check_library(caller: Caller, quick: bool, device: str = "cuda") -> Iterator[dict[str, Any]]:
    """A row for each case and way to call; `built` is false where the libraries lack the kernels."""
    for case in small_cases(quick):
        named = {name: str(value).removeprefix("torch.") for name, value in case.items()}
        try:
            caller.library.prepare(problem_of(*fresh(case, device)))
        except SharpError as error:
            if "has no kernel" in str(error):
                yield {**named, "built": False}
                continue
            # Another failure is one of every call: the rows below say it.
        call = fresh(case, device)[0]
        wanted = expected(to_numpy(call.tensors), call.normalizer, call.attributes)
        ways = HOW[:1] if case.get("cache_dtype") == torch.int8 else HOW  # the plugin has no int8 caches
        for how in ways:
            found: dict[str, Any]
            try:
                errors = compare(fresh(case, device)[0], wanted, lambda given, how=how: caller.run(given, how))
                found = {**errors, "holds": holds(errors, case["dtype"])}
            except (RuntimeError, SharpError) as error:
                found = {**failure(error), "holds": False}
            yield {**named, "how": how, "built": True, **found}
            check_device()


def fresh(case: dict[str, Any], device: str) -> tuple[Call, torch.Tensor, torch.Tensor]:
    """The case's call as it is before the caches change, and two tensors in the place of outputs."""
    call = make_call(sequences=MIXED, device=device, **HEADS, **case)
    return call, call.tensors["query"], call.tensors["query"]


def main() -> int:
    """Compare, print and write; 1 if a result is wrong or there is none."""
    parser = argparse.ArgumentParser(description="The compiled GPU libraries against float64.")
    parser.add_argument("--libraries", type=Path, default=Path("build/gpu"), help="folder of the three libraries")
    parser.add_argument("--quick", action="store_true", help="fewer cases")
    parser.add_argument("--output", type=Path, default=RESULTS, help="results file")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_library.py: torch finds no CUDA device; run it on a machine with an NVIDIA GPU", file=sys.stderr)
        return 2
    torch.cuda.init()
    torch.zeros(1, device="cuda")  # makes torch's context current, which the library launches in
    rows = []
    try:
        for row in check_library(Caller(chosen.libraries), chosen.quick):
            rows.append(row)
            print(show(row), flush=True)
            merge_results(chosen.output, {"device": torch.cuda.get_device_name(), "complete": False, "rows": rows})
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
