"""Triton kernels become machine code for every GPU, on a machine without a GPU."""

import json
import re
import subprocess
from dataclasses import replace

import pytest
from click.testing import CliRunner

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

from sharp.core.errors import InputError, SharpError
from sharp.plugins.cuda.build_kernels import compile_all, main, summary
from sharp.plugins.cuda.compiler import CAPABILITIES, MOST_SHARED, compile_kernel
from sharp.plugins.cuda.package import write_package
from tests.full.cuda.small_kernels import odd_kernel, product_kernel, scale_kernel


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_target_gets_machine_code(cache, capability):
    image = compile_kernel(scale_kernel(), capability, cache)
    assert image.content[:4] == b"\x7fELF"
    assert b".text.scale\0" in image.content
    # In NVIDIA's ELF headers, the architecture is the low byte of the flags or a byte beside it.
    assert capability in image.content[48:52]
    kind = "f" if capability in (100, 120) else "a" if capability >= 90 else ""
    assert (image.target, image.threads, image.exact) == (f"sm_{capability}{kind}", 128, kind == "a")
    assert compile_kernel(scale_kernel(), capability, cache).content == image.content


def test_machine_code_has_the_parameters_that_a_launch_passes(cache, tmp_path):
    from triton import knobs

    (tmp_path / "scale.cubin").write_bytes(compile_kernel(scale_kernel(), 90, cache).content)
    command = [knobs.nvidia.cuobjdump.path, "-elf", tmp_path / "scale.cubin"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    parameters = re.findall(r"Ordinal\s*:\s*(0x\w+).*?Size\s*:\s*(0x\w+)", listed)
    # The parameters are x, y, count, factor, and two hidden pointers.
    assert [size for _, size in sorted((int(at, 16), int(size, 16)) for at, size in parameters)] == [8, 8, 4, 4, 8, 8]


@pytest.mark.parametrize("capability", [90, 100, None])
def test_another_hidden_parameter_is_refused(cache, monkeypatch, capability):
    monkeypatch.setattr("sharp.plugins.cuda.compiler.HIDDEN_ARGUMENTS", ("global_scratch",))
    with pytest.raises(InputError, match=r"scale has the parameters .* in PTX, but should have"):
        compile_kernel(scale_kernel(), capability, cache)


def test_ptx_is_for_every_later_gpu(cache):
    image = compile_kernel(scale_kernel(), None, cache)
    text = image.content.decode()
    assert ".target sm_80\n" in text and ".version 8.5" in text and text.endswith("\0")
    assert image.target == "compute_80" and image.ptx and not image.exact
    # The parameters are x, y, count, factor, and the pointers that Triton hides at the end.
    assert text.count(".param ") == 6 and len(image.hidden) == 2


@pytest.mark.parametrize("later", ["sm_90", "sm_103", "sm_121"])
def test_the_ptx_translates_for_gpus_without_machine_code_of_their_own(cache, tmp_path, later):
    from triton import knobs

    (tmp_path / "scale.ptx").write_bytes(compile_kernel(scale_kernel(), None, cache).content.rstrip(b"\0"))
    command = [
        knobs.nvidia.ptxas_blackwell.path,
        f"--gpu-name={later}",
        tmp_path / "scale.ptx",
        "-o",
        tmp_path / "scale.cubin",
    ]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert b".text.scale\0" in (tmp_path / "scale.cubin").read_bytes()


def test_what_was_compiled_is_not_compiled_again(cache):
    first = compile_kernel(scale_kernel(block=64), 90, cache)
    again = compile_kernel(scale_kernel(block=64), 90, cache)
    assert first.seconds is not None and again.seconds is None
    assert replace(again, seconds=first.seconds) == first
    for other in (scale_kernel(block=32), scale_kernel(block=64, warps=2)):
        assert compile_kernel(other, 90, cache).seconds is not None


def test_a_changed_class_of_options_is_compiled_again(cache, monkeypatch):
    compile_kernel(scale_kernel(block=256), 80, cache)
    monkeypatch.setattr("inspect.getsource", lambda _module: "another definition of the options")
    assert compile_kernel(scale_kernel(block=256), 80, cache).seconds is not None


def test_more_shared_memory_than_a_gpu_has_is_refused(cache, monkeypatch):
    needed = compile_kernel(product_kernel(32), 86, cache).shared_bytes
    assert needed > 0
    monkeypatch.setitem(MOST_SHARED, 86, needed - 1)
    with pytest.raises(
        InputError, match=rf"product32 needs {needed} bytes of shared memory, but .* 86 has {needed - 1}"
    ):
        compile_kernel(product_kernel(32), 86, cache)


def test_parameters_that_do_not_fit_the_function_are_refused(cache):
    kernel = scale_kernel()
    with pytest.raises(InputError, match="'count'"):
        compile_kernel(replace(kernel, arguments={"x": "*fp16", "y": "*fp16", "factor": "fp32"}), 80, cache)


def test_a_kernel_that_does_not_compile_is_named(cache):
    with pytest.raises(SharpError, match=r"kernel odd does not compile for 90: (.|\n)*power of 2"):
        compile_kernel(odd_kernel(), 90, cache)


def test_the_command_names_kernels_and_refuses_what_is_none():
    runner = CliRunner()
    chosen = ("--normalizer", "ssa", "--head-dim", "64", "--dtype", "float16", "--feature", "alibi", "--target", "80")
    listed = runner.invoke(main, [*chosen, "--op", "PagedAttention", "--list"]).output.splitlines()
    assert listed == [
        "write_cache float16 float16 64 64 16",
        "decode_stream float16 float16 64 64 16 ssa alibi",
        "merge float16 float16 64 64 16 ssa",
        "prefill float16 float16 64 64 16 ssa alibi",
        "merge_prompts float16 float16 64 64 16 ssa",
        "sample_rows",
    ]
    listed = runner.invoke(main, [*chosen, "--op", "SharpAttention", "--list"]).output.splitlines()
    assert listed[0] == "write_present float16 float16 64 64 16 contiguous"
    chosen = ("--normalizer", "softmax", "--head-dim", "80", "--dtype", "float32/bfloat16", "--feature", "plain")
    listed = runner.invoke(main, [*chosen, "--list"]).output.splitlines()
    assert listed[0] == "write_cache float32 bfloat16 80 80 16"
    refused = runner.invoke(main, ["--target", "75"])
    assert refused.exit_code == 2 and "'75' is not one of '80', '86'" in refused.output


def test_several_compilers_give_what_one_gives(cache):
    work = [(kernel, goal) for kernel in (scale_kernel("a"), scale_kernel("b", block=64)) for goal in (80, None)]
    heard = []
    two = compile_all(work, cache, 2, heard.append)
    assert [(image.kernel, image.target) for image in two] == [
        ("a", "sm_80"),
        ("a", "compute_80"),
        ("b", "sm_80"),
        ("b", "compute_80"),
    ]
    assert heard == two
    one = compile_all(work, cache, 1)
    assert [image.content for image in one] == [image.content for image in two]
    table = summary(two)
    assert [next(iter(column.cells)) for column in table.columns][:2] == ["sm_80", "2"]


def test_the_package_has_every_image_and_says_how_it_is_launched(cache, tmp_path):
    images = compile_all([(scale_kernel(), goal) for goal in (80, 90, None)], cache, 1)
    size = write_package(images, {"kMostSplits": 7}, tmp_path)
    content = (tmp_path / "kernels.bin").read_bytes()
    entries = json.loads((tmp_path / "kernels.json").read_text())
    assert size == len(content)
    for image, entry in zip(images, entries, strict=True):
        assert entry["offset"] % 64 == 0
        assert content[entry["offset"] :][: entry["bytes"]] == image.content
        assert list(entry["arguments"]) == ["x", "y", "count", "factor"]
        assert entry["hidden_arguments"] == ["global_scratch", "profile_scratch"]
    assert '"x:ptr y:ptr count:i32 factor:fp32", 2, {0, 0}}' in (tmp_path / "kernels.cc").read_text()
    assert "const int64_t kMostSplits = 7;" in (tmp_path / "kernels.cc").read_text()
