"""`sharp build`: TensorRT-RTX reads exported models and builds engines without a GPU."""

import json

import pytest
from click.testing import CliRunner

from sharp.exporter.build import build
from tests.marks import full

pytest.importorskip("tensorrt_rtx_bindings", reason="the TensorRT-RTX bindings are not installed")
BACKEND = ("--backend", "tensorrt-rtx", "--compute-capability")


def run(*arguments):
    return CliRunner().invoke(build, [str(argument) for argument in arguments], prog_name="sharp build")


@pytest.mark.full
@pytest.mark.parametrize(
    ("norm", "positions", "cache", "dtype"),
    [
        ("softmax", "rope", "paged", "bfloat16"),
        full("ssa", "nape", "contiguous", "float32"),
        full("asentmax", "nape", "none", "float16"),
    ],
)
def test_engines_of_every_form(checkpoint, sharp_export, tmp_path, norm, positions, cache, dtype):
    options = ("--norm", norm, "--cache", cache, "--dtype", dtype)
    result = sharp_export(checkpoint(norm, positions), *options, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    result = run(tmp_path / "out", *BACKEND, 89, "--max-context", 96, "-o", tmp_path / "engine")
    assert result.exit_code == 0, result.output
    assert "96 of context" in result.output
    assert (tmp_path / "engine").stat().st_size > 1000


@pytest.mark.full
def test_an_engine_of_quantized_weights_keeps_them_small(checkpoint, sharp_export, tmp_path):
    source = checkpoint("ssa", hidden_size=512, intermediate_size=1024, tie_embeddings=False)
    options = ("--norm", "ssa", "--cache", "none", "--dtype", "float16")
    sizes = {}
    for name, quantize in {"half": (), "quantized": ("--quantize", "int4-128")}.items():
        result = sharp_export(source, *options, *quantize, "-o", tmp_path / name)
        assert result.exit_code == 0, result.output
        result = run(tmp_path / name, *BACKEND, 89, "--max-context", 96, "-o", tmp_path / f"{name}.engine")
        assert result.exit_code == 0, result.output
        sizes[name] = (tmp_path / f"{name}.engine").stat().st_size
    # bytes of the products' weights in float16
    products = 2 * (3 * 512 * 1024 + 2 * 512 * 48 + 2 * 512 * 16 + 512 * 257)
    # The products keep 4 or 8 of 16 bits, scales are added, and an engine has more than its weights.
    assert sizes["quantized"] < sizes["half"] - 0.3 * products


def test_what_cannot_be_built_is_refused_in_a_sentence(checkpoint, sharp_export, tmp_path):
    out = tmp_path / "out"
    sharp_export(checkpoint("softmax"), "--norm", "softmax", "-o", out)
    longest = json.loads((out / "sharp.json").read_text())["max_context"]
    result = run(out, *BACKEND, 89, "--max-context", longest + 1)
    assert (result.exit_code, f"is {longest + 1}, but" in result.output) == (2, True)
    written = (out / "sharp.json").read_text()
    (out / "sharp.json").write_text(written.replace('"verified": true', '"verified": false'))
    result = run(out, *BACKEND, 89)
    assert (result.exit_code, "--allow-unverified" in result.output) == (2, True)
    assert run(out, *BACKEND, 89, "--allow-unverified", "-o", tmp_path / "engine").exit_code == 0
    (out / "sharp.json").write_text(written.replace('"target": "onnxruntime"', '"target": "tensorrt"'))
    result = run(out, *BACKEND, 89)
    assert (result.exit_code, "export the model again with --target portable" in result.output) == (2, True)
    (out / "sharp.json").write_text(written)
    for place in (tmp_path / "missing" / "engine", tmp_path):
        result = run(out, *BACKEND, 89, "-o", place)
        assert (result.exit_code, f"the engine {place} cannot be written" in result.output) == (2, True)
    result = run(out, *BACKEND, 42)
    assert (result.exit_code, "but must be one of: 75" in result.output) == (2, True)
    (out / "model.onnx").write_bytes(b"")
    assert run(out, *BACKEND, 89).exit_code == 2
    assert not list(out.glob("*.engine"))
