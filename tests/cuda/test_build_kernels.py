"""`make kernels` as CI runs it: one target, two head dims, the kernels of softmax; then the library over them."""

import ctypes
import json

import pytest
from click.testing import CliRunner

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

from sharp.plugins.build_kernels import main
from tests.cuda.native import build_libraries

CHOSEN = ("--target", "90", "--head-dim", "64", "--head-dim", "128", "--dtype", "bfloat16", "--feature", "plain")


def build(folder, jobs):
    result = CliRunner().invoke(main, [*CHOSEN, "--normalizer", "softmax", "-o", str(folder), "--jobs", jobs])
    assert result.exit_code == 0, result.output
    return result.output


def test_kernels_are_compiled_packed_and_built_into_a_library(tmp_path):
    said = build(tmp_path / "kernels", "2")
    assert ": 20 kernels, " in said and "20 compiled and 0 from the cache" in said
    entries = json.loads((tmp_path / "kernels" / "kernels.json").read_text())
    functions = [entry["kernel"].split()[0] for entry in entries]
    assert {name: functions.count(name) for name in functions} == {
        "write_cache": 2,  # PagedAttention's, of each head dim
        "write_present": 2,  # Attention's
        "decode_stream": 4,
        "merge": 4,
        "merge_prompts": 4,
        "prefill": 4,
    }
    assert {entry["target"] for entry in entries} == {"sm_90a"}
    images = (tmp_path / "kernels" / "kernels.bin").read_bytes()
    for entry in entries:
        image = images[entry["offset"] :][: entry["bytes"]]
        assert image[:4] == b"\x7fELF" and f".text.{entry['entry']}\0".encode() in image
    # What does not change is not compiled again, whichever process compiled it, and gives the same bytes.
    assert "0 compiled and 20 from the cache" in build(tmp_path / "kernels", "1")
    assert (tmp_path / "kernels" / "kernels.bin").read_bytes() == images

    build_libraries(tmp_path / "kernels", tmp_path / "build")
    library = tmp_path / "build" / "libsharp_cuda.so"
    assert images in library.read_bytes()
    assert ctypes.CDLL(str(library)).sharp_cuda_paged_attention
