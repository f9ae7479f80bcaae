"""The kernels compile for GPUs that are not there, and the launched kernels follow from shapes alone."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from sharp.core.errors import InputError
from sharp.plugins.triton import launching
from sharp.plugins.triton.launch_plan import Grid, LaunchPlan, Shapes
from sharp.plugins.triton.options import Options
from sharp.plugins.triton.paged_attention import paged_attention
from sharp.plugins.triton.variants import Kernel, compile_kernel, kernels
from tests.plugins.conformance.cases import Case, Shape, make_case

# A variant compiles in half a minute alone, and in over ten minutes beside three other tests that compile.
pytestmark = pytest.mark.timeout(1800)
SHARED_MEMORY = {80: 163, 86: 99, 90: 227}  # KiB of shared memory that a block may have, by compute capability
SHAPE = Shape(sequences=((70, 1), (33, 9)), kv_heads=1, head_dim=64, value_dim=64)

ENTMAX_LOOPS = {"prefill_observe": 6, "prefill_count": 2, "prefill_settled": 4}
VARIANTS = {
    "entmax for sm_90": (
        Options("entmax", "bfloat16", "bfloat16", 64, 64, 16, statistics=True, alibi=True, softcap=True, power="two"),
        90,
    ),
    "entmax over contiguous keys for sm_90": (
        Options("entmax", "bfloat16", "bfloat16", 64, 64, 16, statistics=True, contiguous=True, power="two"),
        90,
    ),
    "ssa for sm_80": (Options("ssa", "float16", "float16", 40, 40, 32), 80),
    "adaptive softmax for sm_86, tiles smaller than a block": (
        Options("adaptive_softmax", "bfloat16", "bfloat16", 64, 64, 128),
        86,
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_kernel_compiles(name: str) -> None:
    options, capability = VARIANTS[name]
    for kernel in kernels(options, capability):
        compiled = compile_kernel(kernel, capability)
        assert compiled.asm["cubin"][:4] == b"\x7fELF"
        assert compiled.metadata.shared <= SHARED_MEMORY[capability] * 1024
        if kernel.name in ("decode_stream", "decode_observe", "prefill"):
            ptx = compiled.asm["ptx"]
            assert ("wgmma" if kernel.name == "prefill" and capability == 90 else "mma.sync") in ptx
            assert "cp.async.cg.shared.global" in ptx  # keys come in vectors of 16 bytes, before they are used


@pytest.mark.parametrize("normalizer", ["softmax", "ssa", "entmax"])
def test_matrix_products_of_prompts_run_ahead(normalizer: str, tmp_path: Path) -> None:
    options = Options(normalizer, "bfloat16", "bfloat16", 128, 128, 16, power="two" if normalizer == "entmax" else "")
    prefill = next(kernel for kernel in kernels(options, 90) if kernel.name == "prefill")
    said = assembled(compile_kernel(prefill, 90), 90, tmp_path)
    assert "registers" in said
    assert "serialized" not in said  # the assembler serializes where registers run out, which multiplies the time


@pytest.mark.parametrize(
    ("normalizer", "loops", "contiguous"),
    [
        ("softmax", {"decode_stream": 4, "prefill": 4}, False),
        (
            "adaptive_softmax",
            {"decode_observe": 4, "decode_settled": 2, "prefill": 8, "prefill_observe": 4, "prefill_settled": 4},
            True,
        ),
        ("entmax", {"decode_observe": 4, "prefill": 12} | ENTMAX_LOOPS, False),
        ("entmax", {"decode_observe": 4, "prefill": 12} | ENTMAX_LOOPS, True),
    ],
)
def test_keys_and_values_are_loaded_ahead(normalizer: str, loops: dict[str, int], contiguous: bool) -> None:
    # A pass has a loop over full tiles and a loop over the others, each with and without statistics.
    power = "two" if normalizer == "entmax" else ""
    options = Options(normalizer, "bfloat16", "bfloat16", 64, 64, 16, True, power=power, contiguous=contiguous)
    # entmax's kernels take longest to compile, so this uses the options that another test has compiled
    if normalizer == "entmax":
        options = VARIANTS["entmax over contiguous keys for sm_90" if contiguous else "entmax for sm_90"][0]
    for kernel in kernels(options, 90):
        if kernel.name in loops:
            bodies = re.findall(r"scf\.for.*?scf\.yield", compile_kernel(kernel, 90).asm["ttgir"], re.DOTALL)
            products = [body for body in bodies if re.search(r"warp_group_dot |tt\.dot", body)]
            assert len(products) == loops[kernel.name]
            for body in products:
                assert "async_copy_global_to_local" in body
                assert not re.search(r"tt\.load [^\n]*ptr<bf16>", body)


def test_kernels_are_found_in_the_cache_by_whatever_process() -> None:
    # The first kernel that a process hashes depends on the normalizers it has seen; the keys of the cache must not.
    script = """
import sys
from sharp.plugins.triton.options import Options
from sharp.plugins.triton.variants import FUNCTIONS, kernels
for normalizer in sys.argv[1:]:
    for kernel in kernels(Options(normalizer, "float16", "float16", 64, 64, 16), 90):
        kernel.function.cache_key
print(sorted((function.__name__, function.cache_key) for function in FUNCTIONS))
"""
    keys = {
        subprocess.run([sys.executable, "-c", script, *order], capture_output=True, text=True, check=True).stdout
        for order in (("softmax", "entmax"), ("entmax", "softmax"))
    }
    assert len(keys) == 1


class _Driver:
    """A driver of a GPU that compiles and never launches."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def _fake_driver() -> Iterator[None]:
    driver.set_active(_Driver())  # type: ignore[arg-type]
    yield
    driver._active = None


@pytest.mark.usefixtures("_fake_driver")
def test_the_wrapper_launches_what_is_compiled_ahead_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    signatures = {}

    def compile_only(kernel: Kernel, grid: Grid, arguments: dict[str, Any]) -> None:
        given = {name: arguments[name] for name, kind in kernel.signature.items() if kind != "constexpr"}
        compiled = kernel.function.warmup(
            **given, **kernel.constants, num_warps=kernel.warps, num_stages=kernel.stages, grid=grid
        )
        signatures[kernel.name] = compiled.src.signature
        assert compiled.src.signature == kernel.signature
        assert compile_kernel(kernel, 90).hash == compiled.hash

    monkeypatch.setattr(launching, "launch", compile_only)
    inputs = tensors(make_case("sigmoid", SHAPE), "cpu")
    del inputs["collect_stats"]  # the stand-in for a missing optional input must have its type
    paged_attention(**inputs, normalizer="sigmoid", scale=0.125)
    assert list(signatures) == ["write_cache", "decode_stream", "merge", "prefill"]


def test_no_launch_depends_on_what_a_tensor_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    # Tensors of the device "meta" hold no numbers: a launch that read one would fail.
    launched = []
    monkeypatch.setattr(launching, "launch", lambda kernel, grid, arguments: launched.append(grid))
    for normalizer in ("softmax", "adaptive_softmax", "entmax"):
        case = make_case(normalizer, SHAPE, alibi=True)
        paged_attention(**tensors(case, "meta"), normalizer=normalizer, scale=0.125, window=9, softcap=3.0)
    assert len(launched) == 4 + 6 + 6


@pytest.mark.parametrize("sequences", [1, 3])
def test_one_token_each_needs_no_prefill(monkeypatch: pytest.MonkeyPatch, sequences: int) -> None:
    launched = []
    monkeypatch.setattr(launching, "launch", lambda kernel, grid, arguments: launched.append(kernel.name))
    case = make_case("softmax", Shape(sequences=((5, 1),) * sequences))
    paged_attention(**tensors(case, "meta"), normalizer="softmax", scale=1.0)
    assert launched == ["write_cache", "decode_stream", "merge"]


def test_up_to_four_tokens_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    for tokens, group, prefill in ((4, 3, False), (5, 3, True), (4, 16, False), (2, 32, False), (4, 32, True)):
        launched: list[str] = []
        monkeypatch.setattr(launching, "launch", lambda kernel, *_, into=launched: into.append(kernel.name))
        case = make_case("softmax", Shape(sequences=((70, tokens),), group=group))
        paged_attention(**tensors(case, "meta"), normalizer="softmax", scale=1.0)
        assert ("prefill" in launched) is prefill


def planned(options: Options, shapes: Shapes) -> LaunchPlan:
    return launching.plan_of(options, shapes, {kernel.name: kernel for kernel in kernels(options, 90)})


def test_work_items_and_scratch_memory() -> None:
    options = Options("entmax", "bfloat16", "bfloat16", 128, 128, 16, power="two")
    one = Shapes(tokens=1, sequences=1, max_blocks=2048, q_heads=32, kv_heads=8, multiprocessors=132)
    assert planned(options, one).items == 66  # 8 programs an item, 4 for each of 132 multiprocessors
    assert planned(options, one).scratch == {
        "plan": 1 + 1 + 66,
        "sums": 32 * 66 * 8,
        "outputs": 32 * 66 * 128,
        "logits": 32 * 2048 * 16,
        "solution": 32 * 3,
        "tiles": 8 * 1 * (2048 * 16 // 128 + 1),
    }
    short = Shapes(tokens=1, sequences=1, max_blocks=64, q_heads=32, kv_heads=8, multiprocessors=132)
    assert planned(options, short).items == 4  # 1,024 keys, at least 256 an item
    checked = Shapes(tokens=8, sequences=2, max_blocks=2048, q_heads=32, kv_heads=8, multiprocessors=132)
    assert planned(options, checked).scratch["solution"] == 2 * 4 * 32 * 3  # up to 4 tokens of each sequence
    assert planned(options, checked).scratch["sums"] == (66 + 1) * 4 * 32 * 8
    mixed = Shapes(tokens=545, sequences=33, max_blocks=2048, q_heads=32, kv_heads=32, multiprocessors=132)
    assert planned(options, mixed).scratch["solution"] == 33 * 32 * 3  # beside a prompt one token of each sequence
    assert planned(options, mixed).parts == 1  # as many tiles as multiprocessors
    wide = Shapes(tokens=8, sequences=2, max_blocks=2048, q_heads=64, kv_heads=8, multiprocessors=132)
    assert planned(options, wide).items == 33 + 1  # 4 tokens of 8 heads are two tiles
    many = Shapes(tokens=64, sequences=64, max_blocks=2048, q_heads=32, kv_heads=8, multiprocessors=132)
    assert planned(options, many).items == 66 + 63


@pytest.mark.parametrize(
    ("tokens", "sequences", "blocks", "expected"),
    [
        (30, 1, 8192, 16),  # one tile for each of 8 KV heads: 132 // 8
        (30, 1, 1024, 4),  # 16,384 keys, at least 4,096 a part
        (64, 1, 8192, 8),
        (61, 32, 8192, 16),  # 30 tokens of one sequence beside 31 sequences that decode
        (512, 1, 8192, 1),  # 128 tiles need no parts
        (8192, 1, 8192, 1),
        (4, 1, 8192, 1),  # few tokens, which the decode kernels compute
        (8, 8, 8192, 1),
    ],
)
@pytest.mark.parametrize("normalizer", ["softmax", "adaptive_softmax", "entmax"])
def test_the_keys_of_few_prompts_are_split(
    normalizer: str, tokens: int, sequences: int, blocks: int, expected: int
) -> None:
    options = Options(normalizer, "bfloat16", "bfloat16", 128, 128, 16, power="two" if normalizer == "entmax" else "")
    shapes = Shapes(tokens, sequences, blocks, q_heads=32, kv_heads=8, multiprocessors=132)
    plan = planned(options, shapes)
    assert plan.parts == expected
    launched = [launch.function for launch in plan.launches]
    counts = ["prefill_count"] * 4 if normalizer == "entmax" else []
    split = normalizer != "softmax" and expected > 1
    passes = ["prefill_observe", *counts, "prefill_settled"] if split else ["prefill"]
    prompts = [] if tokens in (4, 8) else passes + ["merge_prompts"] * (expected > 1)
    assert [name for name in launched if "pr" in name] == prompts
    sizes, rows = plan.scratch, tokens * 32 * expected * (expected > 1)
    sets_of_sums = {"softmax": 1, "adaptive_softmax": 2, "entmax": 3}[normalizer]
    assert sizes["sums"] // 8 >= rows * sets_of_sums and sizes["outputs"] // 128 >= max(rows, 1)


@pytest.mark.parametrize(
    ("normalizer", "changes", "attributes", "message"),
    [
        ("softmax", {"block_size": 5}, {}, "block size is 5; the Triton kernels need a power of two"),
        ("softmax", {"block_size": 8}, {}, "at least 16"),
        ("softmax", {}, {"scale": -0.125}, "attribute scale is -0.125; it must be a positive, finite number"),
        ("entmax", {}, {"alpha": 1.0}, "attribute alpha is 1; it must be a finite number above 1 for entmax"),
        ("hardmax", {}, {}, "normalizer is 'hardmax'; it must be one of softmax"),
        ("adaptive_softmax", {}, {"temperature_coefficients": (1.0,) * 9}, "has 9 numbers; it must have 1 to 8"),
    ],
)
def test_what_the_kernels_lack_is_refused(
    normalizer: str, changes: dict[str, Any], attributes: dict[str, Any], message: str
) -> None:
    case = make_case("softmax", Shape(**changes))
    with pytest.raises(InputError, match=message):
        paged_attention(**tensors(case, "meta"), normalizer=normalizer, **({"scale": 1.0} | attributes))


@pytest.mark.parametrize(
    ("normalizer", "width", "message"),
    [
        ("ssa", None, "ssa needs head_params"),
        ("ssa", 1, r"head_params has 1 columns; ssa takes 2 \(b, n\) or 3 \(the sink behind them\)"),
        ("ssa", 4, "head_params has 4 columns"),
        ("softmax", 2, r"head_params has 2 columns; softmax takes 1 \(the sink\)"),
        ("relu", 2, r"head_params has 2 columns; relu takes 1 \(power\) and no sink: give it these, or leave it out"),
    ],
)
def test_head_params_have_the_columns_of_the_normalizer(normalizer: str, width: int | None, message: str) -> None:
    inputs = tensors(make_case("softmax"), "meta")
    if width is not None:
        inputs["head_params"] = torch.ones(6, width, device="meta")
    with pytest.raises(InputError, match=message):
        paged_attention(**inputs, normalizer=normalizer, scale=1.0)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("value", (8, 2, 12), r"value has shape \[8, 2, 12\]; it must be \[9, 2, 12\]"),
        ("value_cache", (8, 2, 12, 16), r"value_cache has shape \[8, 2, 12, 16\]; it must be \[\d+, 2, 16, 12\]"),
        ("slot_mapping", (8,), r"slot_mapping has shape \[8\]; it must be \[9\]"),
        ("query_start", (4,), r"query_start has shape \[4\]; it must be \[5\]"),
        ("alibi_slopes", (2,), r"alibi_slopes has shape \[2\]; it must be \[6\]"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(name: str, shape: tuple[int, ...], message: str) -> None:
    inputs = tensors(make_case("softmax"), "meta")
    inputs[name] = torch.ones(shape, device="meta")
    with pytest.raises(InputError, match=message):
        paged_attention(**inputs, normalizer="softmax", scale=1.0)


def test_tokens_without_a_sequence_need_no_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    monkeypatch.setattr(launching, "launch", lambda kernel, grid, arguments: launched.append(kernel.name))
    inputs = tensors(make_case("softmax"), "meta")
    for name, rows in (("block_table", 0), ("context_lens", 0), ("query_start", 1)):
        inputs[name] = inputs[name][:rows].clone()
    paged_attention(**inputs, normalizer="softmax", scale=1.0)
    assert "prefill" not in launched


def test_types_that_the_kernels_lack_are_refused() -> None:
    inputs = tensors(make_case("softmax"), "meta")
    inputs["query"] = inputs["query"].double()
    with pytest.raises(InputError, match=r"query is float64"):
        paged_attention(**inputs, normalizer="softmax", scale=1.0)


def test_what_is_not_contiguous_is_refused() -> None:
    inputs = tensors(make_case("softmax"), "meta")
    inputs["value_cache"] = inputs["value_cache"].transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(InputError, match="value_cache is not contiguous"):
        paged_attention(**inputs, normalizer="softmax", scale=1.0)


def test_the_cpu_is_refused_without_the_interpreter() -> None:
    with pytest.raises(InputError, match="query is on the CPU"):
        paged_attention(**tensors(make_case("softmax"), "cpu"), normalizer="softmax", scale=1.0)


def tensors(case: Case, device: str) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(np.asarray(array), device=device) for name, array in case.inputs.items()}


@pytest.mark.parametrize(
    ("capability", "dtype", "cache_dtype"),
    [(86, "float32", "int8"), (90, "bfloat16", "int8"), (80, "float16", "fp8"), (90, "bfloat16", "fp8")],
)
def test_kernels_of_scaled_caches_have_room(capability: int, dtype: str, cache_dtype: str, tmp_path: Path) -> None:
    options = Options("softmax", dtype, cache_dtype, 64, 64, 16)
    for kernel in kernels(options, capability):
        compiled = compile_kernel(kernel, capability)
        assert compiled.metadata.shared <= SHARED_MEMORY[capability] * 1024
        if kernel.name in ("decode_stream", "prefill"):
            assert "tf32" not in compiled.asm["ptx"]
            said = assembled(compiled, capability, tmp_path)
            assert int(re.findall(r"(\d+) bytes spill stores", said)[0]) < 256, said
        if kernel.name == "decode_stream":
            # Vectors of bytes become operands, and not single bytes from shared memory.
            assert len(re.findall(r"ld\.shared\.[bsu]8", compiled.asm["ptx"])) == 0


def assembled(compiled: Any, capability: int, folder: Path) -> str:
    """Return the assembler's messages about a kernel: its registers, and limits that it met."""
    (folder / "kernel.ptx").write_text(compiled.asm["ptx"])
    target = f"--gpu-name=sm_{capability}{'a' * (capability >= 90)}"
    assembler = [triton.knobs.nvidia.ptxas.path, "-v", target, "kernel.ptx", "-o", "kernel.cubin"]
    return subprocess.run(assembler, cwd=folder, capture_output=True, text=True, check=True).stderr


def test_values_in_tf32_fit_shared_memory() -> None:
    # relu2's weights may leave float16's range, so the values beside them take twice the room.
    options = Options("relu2", "float16", "float16", 128, 128, 16)
    prefill = next(kernel for kernel in kernels(options, 90) if kernel.name == "prefill")
    assert compile_kernel(prefill, 90).metadata.shared <= SHARED_MEMORY[90] * 1024


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("capability", [80, 86])
def test_the_largest_keys_fit_shared_memory(capability: int, contiguous: bool) -> None:
    options = Options("softmax", "float32", "float32", 256, 256, 16, contiguous=contiguous)
    decode = next(kernel for kernel in kernels(options, capability) if kernel.name == "decode_stream")
    assert compile_kernel(decode, capability).metadata.shared <= SHARED_MEMORY[capability] * 1024
