"""The kernels of the key screen compile for GPUs that are not there, and screens without a kernel are refused."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from sharp.core.errors import InputError
from sharp.plugins.triton import launching
from sharp.plugins.triton.options import Options
from sharp.plugins.triton.paged_attention import paged_attention
from sharp.plugins.triton.variants import compile_kernel, kernels
from tests.full.triton.test_variants import SHARED_MEMORY, assembled, tensors
from tests.plugins.conformance.cases import Shape, int8_case, make_case
from tests.plugins.conformance.screened import with_screen

SHAPE = Shape(sequences=((70, 1), (33, 9)), kv_heads=1, head_dim=64, value_dim=64)
OF_SCREEN = ("write_screened_cache", "decode_screen", "decode_survivors")


@pytest.mark.parametrize(("capability", "dtype"), [(90, "bfloat16"), (86, "float16"), (80, "float32")])
def test_its_kernels_compile(capability: int, dtype: str, tmp_path: Path) -> None:
    options = Options("entmax", dtype, dtype, 64, 64, 16, statistics=True, alibi=True, power="two", screened=True)
    found = [kernel for kernel in kernels(options, capability) if kernel.name in OF_SCREEN]
    assert [kernel.name for kernel in found] == list(OF_SCREEN)
    for kernel in found:
        compiled = compile_kernel(kernel, capability)
        assert compiled.metadata.shared <= SHARED_MEMORY[capability] * 1024
        said = assembled(compiled, capability, tmp_path)
        assert int(re.findall(r"(\d+) bytes spill stores", said)[0]) < 64, said
        if kernel.name == "decode_screen":
            # The screen's words are loaded in vectors of 16 bytes, before they are used.
            assert "cp.async.cg.shared.global" in compiled.asm["ptx"]


def screened_tensors(device: str = "meta", normalizer: str = "entmax") -> dict[str, torch.Tensor]:
    return tensors(with_screen(make_case(normalizer, SHAPE)), device)


def test_no_launch_depends_on_what_a_tensor_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    monkeypatch.setattr(launching, "launch", lambda kernel, shapes, arguments: launched.append(kernel.name))
    paged_attention(**screened_tensors(), normalizer="entmax", scale=0.125)
    assert launched == [*OF_SCREEN, "decode_solve", "decode_settled", "merge", "prefill"]


@pytest.mark.parametrize(
    ("normalizer", "name", "changed", "message"),
    [
        ("softmax", "", None, "key_screen is given; only entmax over a cache of floats has one"),
        ("entmax", "key_screen", torch.float32, "key_screen is torch.float32; it must be int8"),
        ("entmax", "key_screen", (9, 1, 7), r"key_screen has shape \[9, 1, 7\]; it must be \[\d+, 1, 1152\]"),
        ("entmax", "key_shift", (2, 64), r"key_shift has shape \[2, 64\]; it must be \[1, 64\]"),
    ],
)
def test_a_screen_that_does_not_fit_is_refused(normalizer: str, name: str, changed: Any, message: str) -> None:
    inputs = screened_tensors(normalizer=normalizer)
    if isinstance(changed, tuple):
        inputs[name] = torch.ones(changed, dtype=inputs[name].dtype, device="meta")
    elif changed is not None:
        inputs[name] = inputs[name].to(changed)
    with pytest.raises(InputError, match=message):
        paged_attention(**inputs, normalizer=normalizer, scale=1.0)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float16])
def test_caches_of_two_dtypes_are_refused(dtype: torch.dtype) -> None:
    inputs = tensors(int8_case(make_case("softmax", SHAPE)), "meta")
    inputs["value_cache"] = inputs["value_cache"].to(dtype)
    with pytest.raises(InputError, match=f"value_cache is {dtype} and key_cache torch.int8; both must be of one dtype"):
        paged_attention(**inputs, normalizer="softmax", scale=1.0)


def test_a_screen_that_is_not_contiguous_or_beside_an_int8_cache_is_refused() -> None:
    inputs = screened_tensors()
    inputs["key_screen"] = inputs["key_screen"].transpose(0, 2).contiguous().transpose(0, 2)
    with pytest.raises(InputError, match="key_screen is not contiguous"):
        paged_attention(**inputs, normalizer="entmax", scale=1.0)
    of_int8 = tensors(int8_case(make_case("entmax", SHAPE)), "meta")
    with pytest.raises(InputError, match="only entmax over a cache of floats has one"):
        paged_attention(**of_int8, key_screen=screened_tensors()["key_screen"], normalizer="entmax", scale=1.0)
