"""`make kernels` as CI runs it: one target, one head dim, the kernels of softmax, and then the library."""

import ctypes
import json

import onnx
import pytest
from click.testing import CliRunner

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

from sharp.exporter.cli import export
from sharp.models.checkpoint import save_checkpoint
from sharp.plugins.cuda.build_kernels import main
from tests.exporter.conftest import tiny_model
from tests.full.cuda.native import build_libraries

CHOSEN = ("--target", "90", "--head-dim", "64", "--dtype", "bfloat16")
OPS = ("--op", "PagedAttention", "--op", "SharpAttention")


def build(folder, jobs):
    result = CliRunner().invoke(main, [*CHOSEN, *OPS, "--normalizer", "softmax", "-o", str(folder), "--jobs", jobs])
    assert result.exit_code == 0, result.output
    return result.output


def test_kernels_are_compiled_packed_and_built_into_a_library(tmp_path):
    said = build(tmp_path / "kernels", "2")
    assert ": 11 kernels, " in said and "11 compiled and 0 from the cache" in said
    entries = json.loads((tmp_path / "kernels" / "kernels.json").read_text())
    functions = [entry["kernel"].split()[0] for entry in entries]
    assert {name: functions.count(name) for name in functions} == {
        "write_cache": 1,  # for PagedAttention
        "write_present": 1,  # for SharpAttention
        "decode_stream": 2,
        "merge": 2,
        "merge_prompts": 2,
        "prefill": 2,
        "sample_rows": 1,  # for every model with a paged cache
    }
    assert {entry["target"] for entry in entries} == {"sm_90a"}
    images = (tmp_path / "kernels" / "kernels.bin").read_bytes()
    for entry in entries:
        image = images[entry["offset"] :][: entry["bytes"]]
        assert image[:4] == b"\x7fELF" and f".text.{entry['entry']}\0".encode() in image
    # A kernel that did not change is not compiled again, whichever process compiled it, and gives the same bytes.
    assert "0 compiled and 11 from the cache" in build(tmp_path / "kernels", "1")
    assert (tmp_path / "kernels" / "kernels.bin").read_bytes() == images

    build_libraries(tmp_path / "kernels", tmp_path / "build")
    library = tmp_path / "build" / "libsharp_cuda.so"
    assert images in library.read_bytes()
    assert ctypes.CDLL(str(library)).sharp_cuda_paged_attention


def exported(folder, model, norm, *options):
    save_checkpoint(folder / "tiny.safetensors", model)
    arguments = [folder / "tiny.safetensors", "--norm", norm, *options, "-o", folder / "out"]
    result = CliRunner().invoke(export, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return folder / "out"


def listed(*arguments):
    return CliRunner().invoke(main, [*map(str, arguments), "--list"])


def test_a_model_says_which_kernels_it_needs(tmp_path):
    options = ("--dtype", "float16", "--block-size", "32")
    folder = exported(tmp_path, tiny_model("asentmax", "nape"), "asentmax", *options)
    result = listed("--model", folder)
    sizes = "float16 float16 8 8 32"
    assert result.output.splitlines() == [
        f"write_cache {sizes}",
        f"decode_observe {sizes} entmax alibi",
        f"decode_solve {sizes} entmax two",
        f"decode_settled {sizes} entmax two",
        f"merge {sizes} entmax",
        f"prefill {sizes} entmax two alibi",
        f"prefill_observe {sizes} entmax two alibi",
        f"prefill_count {sizes} entmax two alibi",
        f"prefill_settled {sizes} entmax two alibi",
        f"merge_prompts {sizes} entmax",
        "sample_rows",
    ]
    assert result.output == listed("--model", folder, "--target", "90").output
    said = listed("--model", folder, "--head-dim", "64")
    assert said.exit_code == 2 and "--model says which kernels are compiled; leave --head-dim out" in said.output


def test_a_model_without_a_paged_cache_needs_those_of_attention(tmp_path):
    folder = exported(tmp_path, tiny_model("ssa"), "ssa", "--cache", "none", "--dtype", "float16")
    sizes = "float32 float32 8 8 16 contiguous"
    functions = ("write_present", "decode_stream", "merge", "prefill", "merge_prompts")
    assert [line.replace(" ssa", "") for line in listed("--model", folder).output.splitlines()] == [
        f"{function} {sizes}" for function in functions
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--target", "portable"), "has no node of Sharp's attention and needs no kernels"),
        (("--block-size", "48"), "has blocks of 48 keys, and kernels for GPUs need a power of two"),
    ],
)
def test_a_model_that_kernels_do_not_help_is_refused(tmp_path, options, words):
    folder = exported(tmp_path, tiny_model("softmax"), "softmax", *options)
    result = listed("--model", folder)
    assert result.exit_code == 2 and words in result.output


def test_a_graph_without_a_normalizer_is_refused(tmp_path):
    folder = exported(tmp_path, tiny_model("ssa"), "ssa")
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    for node in model.graph.node:
        others = [attribute for attribute in node.attribute if attribute.name != "normalizer"]
        del node.attribute[:]
        node.attribute.extend(others)
    onnx.save(model, folder / "model.onnx")
    result = listed("--model", folder)
    assert result.exit_code == 2 and "has no attribute normalizer; export the model again" in result.output


def test_blocks_of_another_size_are_chosen():
    chosen = ("--normalizer", "softmax", "--feature", "plain", "--head-dim", "64", "--dtype", "bfloat16")
    lines = listed(*chosen, "--block-size", "32", "--block-size", "128", "--op", "PagedAttention").output.splitlines()
    assert lines.pop() == "sample_rows"
    assert {" ".join(line.split()[1:6]) for line in lines} == {f"bfloat16 bfloat16 64 64 {size}" for size in (32, 128)}


def test_the_default_has_every_normalizer_of_common_models_and_no_more():
    lines = listed().output.splitlines()
    assert len(lines) < 250
    for sizes in ("float16 float16 64 64 16", "bfloat16 bfloat16 128 128 16"):
        assert {f"decode_stream {sizes} softmax", f"prefill {sizes} ssa", f"decode_screen {sizes} entmax"} <= {*lines}
    assert not [line for line in lines if "int8" in line or "alibi" in line or "contiguous" in line]
