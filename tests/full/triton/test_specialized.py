"""Full tiles of prompts by `specialized.py`: interpreted, it agrees with the float64 reference; compiled, it overlaps.

No GPU has run it: what is looked at here is Triton's code for sm_90.
"""

import dataclasses
import re
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sharp.plugins.ops.attention_reference import ContiguousOutput
from sharp.plugins.ops.reference import AttentionOutput
from sharp.plugins.triton.launch_sizes import Shapes
from sharp.plugins.triton.launching import launch
from sharp.plugins.triton.options import Options
from sharp.plugins.triton.variants import Kernel, compile_kernel, kernels
from tests.full.triton import interpreted
from tests.full.triton.interpreted import CACHES, DATA, PASTS
from tests.full.triton.test_kernels import DTYPES, assert_close, rounded
from tests.full.triton.test_variants import SHARED_MEMORY, assembled
from tests.plugins.conformance import attention_cases
from tests.plugins.conformance.cases import Shape, make_case

# A prompt behind a context that ends inside a block, one that is decoded, one without a context, one without a token.
LENGTHS = ((130, 150), (300, 1), (0, 260), (9, 0))
PROMPTS = Shape(sequences=LENGTHS, kv_heads=1, group=2, head_dim=64, value_dim=64, block_size=128)
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sinks": {"sinks": True},
    "window": {"window": 200},
    "encoder": {"causal": 0},
    "holes": {"holes": True, "causal": 0},
    "a group that no tile has whole tokens of": {"group": 3},
    "statistics": {"collect": True},
}


@pytest.mark.parametrize(("normalizer", "dtype"), [("softmax", "float16"), ("ssa", "bfloat16")])
@pytest.mark.parametrize("name", CALLS)
def test_prompts(interpreter: ProcessPoolExecutor, normalizer: str, dtype: str, name: str) -> None:
    changes = dict(CALLS[name])
    collect, group = changes.pop("collect", False), changes.pop("group", 2)
    shape = dataclasses.replace(PROMPTS, group=group, holes=changes.pop("holes", False))
    case = rounded(make_case(normalizer, shape, seed=3, **changes), (*DATA, *CACHES), dtype)
    case = case.with_inputs(collect_stats=np.array(collect))
    found, tiles = interpreter.submit(interpreted.run_specialized, case, dtype).result()
    assert (tiles > 0) == (name in ("plain", "sinks", "window", "encoder", "holes"))
    assert_close(AttentionOutput(**found), case, dtype)


@pytest.mark.parametrize("normalizer", ["softmax", "ssa"])
@pytest.mark.parametrize("causal", [0, 1])
def test_contiguous_keys(interpreter: ProcessPoolExecutor, normalizer: str, causal: int) -> None:
    shape = attention_cases.Shape(
        batch=2, queries=150, new_keys=150, past=130, kv_heads=1, group=2, head_dim=64, value_dim=64, padded=True
    )
    case = attention_cases.make_case(normalizer, shape, seed=4, causal=causal)
    rounded_inputs = {
        name: case.inputs[name].astype(DTYPES["float16"]).astype(np.float32)
        for name in (*DATA, *PASTS)
        if name in case.inputs
    }
    case = case.with_inputs(**rounded_inputs, collect_stats=np.array(False))
    found, tiles = interpreter.submit(interpreted.run_specialized, case, "float16").result()
    assert tiles > 0
    actual, expected = ContiguousOutput(**found), attention_cases.run_reference(case)
    largest = np.abs(expected.output).max()
    np.testing.assert_allclose(actual.output, expected.output, rtol=2**-10, atol=2**-10 * largest)


def test_rows_whose_keys_are_all_in_full_tiles_keep_weights_that_only_a_shift_can_say(interpreter) -> None:
    """Logits near -100 with n = 30: weights of 2^-200, of which the tiles with masks have none."""
    shape = attention_cases.Shape(
        batch=1, queries=256, new_keys=256, past=0, kv_heads=1, group=2, head_dim=64, value_dim=64
    )
    case = attention_cases.make_case("ssa", shape, seed=5, causal=0, scale=0.125)
    key = 1 + 0.25 * np.random.default_rng(5).random(case.inputs["key"].shape)
    changed = {"key": key, "query": np.full(case.inputs["query"].shape, -11.0), "value": case.inputs["value"]}
    given = {name: array.astype(DTYPES["bfloat16"]).astype(np.float32) for name, array in changed.items()}
    params = np.tile(np.array([1.0, 30.0], np.float32), (2, 1))
    case = case.with_inputs(**given, head_params=params, collect_stats=np.array(False))
    found, tiles = interpreter.submit(interpreted.run_specialized, case, "bfloat16").result()
    assert tiles > 0
    expected = attention_cases.run_reference(case)
    np.testing.assert_allclose(found["output"], expected.output, rtol=2**-6, atol=2**-6 * np.abs(expected.output).max())


def launched(normalizer: str, contiguous: bool, head_dim: int, statistics: bool = True) -> dict[str, Kernel]:
    """What a specialized prompt launches for sm_90, by name."""
    options = Options(normalizer, "bfloat16", "bfloat16", head_dim, head_dim, 128, statistics, contiguous=contiguous)
    found = kernels(options, 90, specialized=True)
    return {one.name: one for one in reversed(found)}  # the first of each


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("normalizer", ["softmax", "ssa"])
def test_warps_have_tasks(normalizer: str, contiguous: bool, head_dim: int, tmp_path: Path) -> None:
    compiled = compile_kernel(launched(normalizer, contiguous, head_dim)["prefill_full"], 90)
    ptx = compiled.asm["ptx"]
    assert compiled.metadata.num_warps == 12  # two groups that multiply and one that loads
    assert compiled.metadata.shared <= SHARED_MEMORY[90] * 1024
    assert len(re.findall(r"setmaxnreg\.inc", ptx)) >= 2
    assert "cp.async.bulk.tensor" in ptx
    assert "ld.global.v4" not in ptx  # keys and values do not come by pointers
    assert len(re.findall(r"wgmma\.mma_async", ptx)) == 2 * (head_dim // 16 + 128 // 16)  # once for each group
    said = assembled(compiled, 90, tmp_path)
    assert "0 bytes spill stores" in said
    assert "serialized" not in said


def test_the_other_tiles_run_ahead(tmp_path: Path) -> None:
    kernel = launched("softmax", False, 128, statistics=False)["prefill"]
    assert kernel.constants["OPTIONS"].specialized
    assert "serialized" not in assembled(compile_kernel(kernel, 90), 90, tmp_path)


@pytest.mark.parametrize(
    ("changes", "capability"),
    [
        ({}, 80),
        ({"normalizer": "entmax", "power": "two"}, 90),
        ({"dtype": "float32", "cache_dtype": "float32"}, 90),
        ({"cache_dtype": "int8"}, 90),
        ({"head_dim": 80}, 90),
        ({"block_size": 16}, 90),
        ({"softcap": True}, 90),
    ],
)
def test_calls_that_it_has_no_kernel_for_are_launched_as_ever(changes: dict[str, Any], capability: int) -> None:
    plain = Options("softmax", "float16", "float16", 64, 64, 128)
    assert len(kernels(plain, 90, specialized=True)) == len(kernels(plain, 90)) + 2
    options = dataclasses.replace(plain, **changes)
    given, ever = kernels(options, capability, specialized=True), kernels(options, capability)
    assert [(one.name, one.constants) for one in given] == [(one.name, one.constants) for one in ever]


def test_its_descriptors_have_memory_whoever_launches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Launched:
        def __getitem__(self, grid: object) -> Any:
            return lambda **_: order.append("launch")

    order: list[str] = []
    monkeypatch.setattr("triton.set_allocator", lambda _: order.append("memory"))
    options = Options("softmax", "bfloat16", "bfloat16", 64, 64, 128)
    call = {"query": torch.empty(1, device="meta")}
    shapes = Shapes(300, 1, 3, 4, 2, 132)
    for special, expected in ((False, ["launch"]), (True, ["memory", "launch"])):
        given = {"OPTIONS": dataclasses.replace(options, specialized=special)}
        launch(Kernel(Launched(), {}, given, 4, 2, lambda _: (1, 1, 1)), shapes, call)
        assert order == expected
        order.clear()
