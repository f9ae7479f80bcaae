"""`sharp-export --key-screen`: an entmax model whose cache also holds an 8-bit copy of its keys."""

import json

import numpy as np
import onnx
import pytest

from sharp import LLM, SamplingParams
from sharp.core.manifest import read_manifest
from sharp.exporter.graph.key_screens import leave_out_key_screens
from sharp.plugins.op.key_screen import screen_bytes
from sharp.serving.config import BackendConfig
from tests.marks import full


@pytest.fixture
def screened(checkpoint, sharp_export, tmp_path):
    def run(norm: str, *options: object, positions: str = "rope"):
        source = checkpoint(norm, positions, trained_context=1024)
        result = sharp_export(source, "--norm", norm, "-o", tmp_path / "out", *options)
        assert result.exit_code == 0, result.output
        return tmp_path / "out"

    return run


@pytest.mark.parametrize(("norm", "positions"), [("entmax", "rope"), full("asentmax", "nape")])
def test_the_export_agrees_with_pytorch_in_both_runtimes(screened, norm, positions):
    folder = screened(norm, "--key-screen", "int8", positions=positions)
    manifest = read_manifest(folder)
    assert manifest.cache.key_screens == (0,)
    comparisons = manifest.verification["comparisons"]
    assert {comparison["runtime"] for comparison in comparisons} == {"kernels", "inlined"}
    assert all(comparison["logits_error"] < 1e-4 for comparison in comparisons)
    graph = onnx.load(folder / "model.onnx").graph
    shapes = {value.name: value.type.tensor_type.shape.dim for value in (*graph.input, *graph.output)}
    assert shapes["key_screen.0"][2].dim_value == shapes["key_screen_out.0"][2].dim_value == screen_bytes(8, 16)
    shifts = [onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer if tensor.name == "key_shift.0"]
    assert shifts[0].shape == (2, 8)
    assert np.abs(shifts[0]).max() > 0
    # Serve long prompts, one of them from the prefix cache, with the screen, and as standard ops, which read all keys.
    prompt = (np.arange(700) * 31 % 251).tolist()
    prompts, params = [prompt, [*prompt[:640], 5, 6]], SamplingParams(temperature=0, max_tokens=6)
    served = LLM(folder).generate(prompts, params)
    standard = LLM(folder, backend=BackendConfig(kernels=False)).generate(prompts, params)
    assert [completion.token_ids for completion in served] == [completion.token_ids for completion in standard]
    # TensorRT-RTX gets the model without key screens.
    model = onnx.load(folder / "model.onnx")
    leave_out_key_screens(model)
    onnx.checker.check_model(model)
    assert "key_screen" not in str(model)


@pytest.mark.parametrize(
    ("norm", "options"),
    [
        ("softmax", ()),
        ("entmax", ("--key-screen", "none")),
        ("entmax", ("--kv-dtype", "int8")),
        ("entmax", ("--kv-dtype", "float16")),
        ("entmax", ("--max-context", "8191")),
        ("entmax", ("--target", "portable")),
        ("entmax", ("--cache", "none")),
    ],
)
def test_no_screen_where_nothing_reads_it_or_it_gains_little(checkpoint, sharp_export, norm, options):
    result = sharp_export(checkpoint(norm), "--norm", norm, "--dry-run", "--json", "-q", *options)
    assert result.exit_code == 0, result.output
    assert not any("key_screen" in name for name in json.loads(result.stdout)["inputs"])


def test_long_contexts_in_float32_have_a_screen_by_default(checkpoint, sharp_export):
    options = ("--norm", "entmax", "--max-context", "8192", "--dry-run", "--json", "-q")
    result = sharp_export(checkpoint("entmax"), *options)
    assert result.exit_code == 0, result.output
    assert any("key_screen" in name for name in json.loads(result.stdout)["inputs"])


def test_alibi_leaves_so_many_keys_in_doubt_that_there_is_none_by_default(checkpoint, sharp_export):
    source = checkpoint("asentmax", "nape")
    options = ("--norm", "asentmax", "--max-context", "8192", "--dry-run", "--json", "-q")
    for screen, expected in (("auto", False), ("int8", True)):
        result = sharp_export(source, *options, "--key-screen", screen)
        assert result.exit_code == 0, result.output
        assert any("key_screen" in name for name in json.loads(result.stdout)["inputs"]) == expected


@pytest.mark.parametrize(
    ("norm", "options", "message"),
    [
        ("softmax", (), "has no head with norm entmax"),
        ("entmax", ("--kv-dtype", "int8"), "a cache of floats"),
        ("entmax", ("--cache", "contiguous"), "--cache paged"),
    ],
)
def test_a_screen_that_nothing_would_read_is_refused(checkpoint, sharp_export, tmp_path, norm, options, message):
    result = sharp_export(checkpoint(norm), "--norm", norm, "-o", tmp_path / "out", "--key-screen", "int8", *options)
    assert result.exit_code == 2
    assert message in result.output
    assert not (tmp_path / "out").exists()
