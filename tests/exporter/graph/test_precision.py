"""Exports with `--dtype`, `--kv-dtype`, `--quantize`, `--block-size`, `--max-context` and `--opset`."""

import json
from dataclasses import replace

import onnx
import pytest
from onnx import TensorProto

from sharp import LLM, SamplingParams
from sharp.core.manifest import read_manifest
from sharp.exporter.forms.uncached.scoring import ExportedModel
from sharp.exporter.graph.lowering import OPSETS
from sharp.exporter.graph.quantization import choose_packings
from sharp.models.checkpoint import save_checkpoint
from sharp.serving.api.errors import InputError
from sharp.serving.backends.onnxruntime import OnnxRuntimeBackend
from sharp.serving.config import BackendConfig
from tests.exporter.conftest import tiny_model
from tests.exporter.tiny_hugging_face import save, tiny
from tests.marks import full

PROMPT = [5, 17, 30, 44, 8, 61, 72, 19, 3, 88, 12]


@pytest.fixture
def wide(tmp_path):
    """Return a function that saves a checkpoint with rows of whole blocks.

    With whole blocks, embedding and output layer can share quantized weights.
    """

    def save(norm: str = "softmax", positions: str = "rope"):
        save_checkpoint(tmp_path / "wide.safetensors", tiny_model(norm, positions, hidden_size=128))
        return tmp_path / "wide.safetensors"

    return save


def generate(folder) -> list[int]:
    llm = LLM(folder)
    (completion,) = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    return completion.token_ids


def stored_types(folder) -> dict[int, int]:
    """Return the bytes of external data for each type of numbers; bytes that two tensors share count once."""
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    parts = {}
    for tensor in model.graph.initializer:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if entries:
            parts[entries["offset"]] = (tensor.data_type, int(entries["length"]))
    return {kind: sum(size for one, size in parts.values() if one == kind) for kind, _ in parts.values()}


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        ({"q_heads": 9, "kv_heads": 3, "head_dim": 64, "hidden_size": 576}, 8),  # SmolLM2-135M
        ({"q_heads": 16, "kv_heads": 8, "head_dim": 128, "hidden_size": 1024}, 8),  # Qwen3-0.6B
        # GPT-2, with as many key heads as query heads
        ({"q_heads": 12, "kv_heads": 12, "head_dim": 64, "hidden_size": 768}, 4),
    ],
)
def test_int4_keeps_the_product_with_few_keys_in_8_bits(heads, expected):
    config = replace(tiny_model("softmax", "rope").config, **heads)
    hidden = config.hidden_size
    layer = [(hidden, (config.q_heads + 2 * config.kv_heads) * config.head_dim), (hidden, 6 * hidden)]
    packings = choose_packings(layer * 30 + [(hidden, 50_000)], "int4", config)
    assert [packing.bits for packing in packings[30:32]] == [expected, 4]
    assert packings[-1].bits == 8
    for_gpus = choose_packings(layer * 30 + [(hidden, 50_000)], "int4-128", config)
    assert [packing.bits for packing in for_gpus] == [packing.bits for packing in packings]
    # only whole blocks can be shared with the embedding
    assert {packing.block for packing in for_gpus} == {128 if hidden % 128 == 0 else 64}


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [("int8", "float32"), full("int4", "float32"), ("int4-128", "float32"), full("int4-128", "float16")],
)
def test_a_quantized_model_is_verified_and_served(wide, sharp_export, tmp_path, quantization, dtype):
    source = wide("ssa", "nape")
    options = ("--norm", "ssa", "--quantize", quantization, "--dtype", dtype)
    result = sharp_export(source, *options, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    manifest = read_manifest(tmp_path / "out")
    assert (manifest.quantization, manifest.dtype, manifest.cache.dtype) == (quantization, dtype, dtype)
    found = {comparison["runtime"] for comparison in manifest.verification["comparisons"]}
    assert found == {"kernels", "inlined", f"kernels {quantization}", f"inlined {quantization}"}
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    limit = {"int8": 0.01, "int4": 0.08, "int4-128": 0.17}[quantization]
    by_kernels, inlined = report["perplexity"]["runtimes"]
    assert abs(by_kernels["relative_error"]) <= limit
    # Standard ops are slow, so they read few tokens, and are compared with the kernels on the same weights.
    assert (by_kernels["reference"], inlined["reference"]) == ("PyTorch", f"kernels {quantization}")
    assert abs(inlined["relative_error"]) <= 2e-2
    sizes = stored_types(tmp_path / "out")
    assert sizes[TensorProto.UINT8] > max(sizes.get(TensorProto.FLOAT, 0), sizes.get(TensorProto.FLOAT16, 0))
    assert len({(tmp_path / "out" / name).stat().st_mode for name in ("model.onnx", "model.onnx.data")}) == 1
    model = onnx.load(tmp_path / "out" / "model.onnx", load_external_data=False)
    kinds = {(node.domain, node.op_type) for node in model.graph.node}
    assert {("com.microsoft", "MatMulNBits"), ("com.microsoft", "GatherBlockQuantized")} <= kinds
    assert not {("", "MatMul"), ("", "Gemm")} & kinds
    assert [(function.domain, function.name) for function in model.functions] == [("ai.sharp", "PagedAttention")]
    assert len(generate(tmp_path / "out")) == 12


@pytest.mark.full
def test_another_form_can_be_quantized(wide, sharp_export, tmp_path):
    options = ("--norm", "softmax", "--cache", "contiguous", "--quantize", "int8")
    result = sharp_export(wide(), *options, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert stored_types(tmp_path / "out")[TensorProto.UINT8] > 0


@pytest.mark.parametrize(("norm", "largest"), [("entmax", 1.0), ("softmax", 0.5)])
def test_under_entmax_means_decide_of_quantized_weights(wide, sharp_export, tmp_path, norm, largest):
    result = sharp_export(wide(norm), "--norm", norm, "--quantize", "int8", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    tolerance = json.loads((tmp_path / "out" / "report.json").read_text())["tolerance"]
    assert (tolerance["logits"], tolerance["cached"], tolerance["mean_logits"]) == (largest, largest, 0.03)


@pytest.mark.parametrize(
    ("norm", "positions", "dtype", "kv_dtype", "cached"),
    [
        full("asentmax", "nape", "float16", None, "float16"),
        ("softmax", "rope", "float16", "int8", "int8"),
        ("entmax", "nape", "float32", "fp8", "fp8"),
        full("softmax", "rope", "float16", "fp8", "fp8"),
        full("ssa", "rope", "float32", "bfloat16", "bfloat16"),
    ],
)
def test_types_of_weights_and_cache(wide, sharp_export, tmp_path, norm, positions, dtype, kv_dtype, cached):
    source = wide(norm, positions)
    options = ("--norm", norm, "--dtype", dtype, *(() if kv_dtype is None else ("--kv-dtype", kv_dtype)))
    result = sharp_export(source, *options, "--block-size", 32, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    manifest = read_manifest(tmp_path / "out")
    assert (manifest.dtype, manifest.cache.dtype, manifest.cache.block_size) == (dtype, cached, 32)
    requested = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}[dtype]
    sizes = stored_types(tmp_path / "out")
    assert max(sizes, key=sizes.__getitem__) == requested
    model = onnx.load(tmp_path / "out" / "model.onnx", load_external_data=False)
    logits = next(value for value in model.graph.output if value.name == "logits")
    assert logits.type.tensor_type.elem_type == TensorProto.FLOAT
    assert len(generate(tmp_path / "out")) == 12


@pytest.mark.parametrize("kv_dtype", ["int8", full("fp8")])
def test_a_scaled_cache_of_a_bfloat16_model_has_queries_of_its_type(wide, sharp_export, tmp_path, kv_dtype):
    options = ("--norm", "softmax", "--dtype", "bfloat16", "--kv-dtype", kv_dtype)
    result = sharp_export(wide(), *options, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    model = onnx.load(tmp_path / "out" / "model.onnx", load_external_data=False)
    attention = {name for node in model.graph.node if node.domain == "ai.sharp" for name in (*node.input, *node.output)}
    casts = [node for node in model.graph.node if node.op_type == "Cast" and {*node.input, *node.output} & attention]
    assert not casts


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_a_scaled_cache_is_not_run_without_kernels(wide, sharp_export, tmp_path, kv_dtype):
    result = sharp_export(wide("entmax", "alibi"), "--norm", "entmax", "--kv-dtype", kv_dtype, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    manifest = read_manifest(tmp_path / "out")
    assert {comparison["runtime"] for comparison in manifest.verification["comparisons"]} == {"kernels"}
    with pytest.raises(InputError, match=rf"has an {kv_dtype} cache, which needs Sharp's kernels"):
        OnnxRuntimeBackend.load(tmp_path / "out", manifest, BackendConfig(kernels=False))


@pytest.mark.full
def test_another_form_in_half_precision(sharp_export, tmp_path):
    source = save(tiny("gemma2"), tmp_path / "gemma2")  # Gemma 2's norms keep float32 scales
    options = ("--norm", "softmax", "--cache", "contiguous", "--dtype", "float16")
    result = sharp_export(source, *options, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert TensorProto.FLOAT16 in stored_types(tmp_path / "out")


def test_experts_that_rounding_chooses_otherwise_are_verified_by_means(sharp_export, tmp_path):
    source = save(tiny("mixtral", vocab_size=91), tmp_path / "mixtral")
    result = sharp_export(source, "--norm", "softmax", "--dtype", "bfloat16", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    largest = max(case["logits"]["max_error"] for case in report["cases"])
    assert 0.1 < largest < 1.0, "no token chose another expert: the test proves nothing"
    assert all(case["tolerance"]["mean_logits"] == 0.03 for case in report["cases"])


@pytest.mark.parametrize(("norm", "cache"), [("ssa", "paged"), full("asentmax", "contiguous")])
def test_bfloat16_is_verified_in_float32(wide, sharp_export, tmp_path, norm, cache):
    options = ("--norm", norm, "--cache", cache, "--dtype", "bfloat16")
    result = sharp_export(wide(norm, "nape"), *options, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "no runtime of a CPU computes in bfloat16" in " ".join(result.output.split())
    sizes = stored_types(tmp_path / "out")
    assert max(sizes, key=sizes.__getitem__) == TensorProto.BFLOAT16
    manifest = read_manifest(tmp_path / "out")
    found = {comparison["runtime"] for comparison in manifest.verification["comparisons"]}
    assert (manifest.dtype, found) == ("bfloat16", {"kernels in float32", "inlined in float32"})
    assert all(path.is_file() for path in (tmp_path / "out").iterdir())  # the temporary float32 copy is removed
    onnx.checker.check_model(tmp_path / "out" / "model.onnx", full_check=True)
    # The error shows that bfloat16 was rounded; an error of the model itself would be larger.
    errors = [comparison["logits_error"] for comparison in manifest.verification["comparisons"]]
    assert 1e-5 < max(errors) < 8e-2
    if cache == "paged":
        with pytest.raises(InputError, match="computes in bfloat16, which ONNX Runtime does not do on a CPU"):
            OnnxRuntimeBackend.load(tmp_path / "out", manifest, BackendConfig())


def test_the_target_tensorrt_has_only_nodes_for_a_plugin(wide, sharp_export, tmp_path):
    options = ("--norm", "ssa", "--target", "tensorrt", "--kv-dtype", "float16")
    result = sharp_export(wide("ssa", "nape"), *options, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    model = onnx.load(tmp_path / "out" / "model.onnx", load_external_data=False)
    nodes = [node for node in model.graph.node if node.domain == "ai.sharp"]
    assert not model.functions  # TensorRT's parser would prefer a function to the plugin
    for node in nodes:
        attributes = {attribute.name for attribute in node.attribute}
        assert {"plugin_version", "plugin_namespace", "normalizer", "causal"} <= attributes
        assert all(node.input)
    manifest = read_manifest(tmp_path / "out")
    assert {comparison["runtime"] for comparison in manifest.verification["comparisons"]} == {"kernels"}
    assert len(generate(tmp_path / "out")) == 12
    with pytest.raises(InputError, match="was exported with --target tensorrt and needs Sharp's kernels"):
        OnnxRuntimeBackend.load(tmp_path / "out", manifest, BackendConfig(kernels=False))


@pytest.mark.parametrize("cache", ["contiguous", full("none")])
def test_the_target_tensorrt_names_all_outputs_of_attention(wide, sharp_export, tmp_path, cache):
    options = ("--norm", "softmax", "--target", "tensorrt", "--cache", cache)
    result = sharp_export(wide(), *options, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    path = tmp_path / "out" / "model.onnx"
    model = onnx.load(path, load_external_data=False)
    nodes = [node for node in model.graph.node if node.domain == "ai.sharp"]
    assert nodes and not model.functions
    for node in nodes:
        # TensorRT's parser requires as many outputs as the plugin has, and no unnamed inputs.
        assert len(node.output) == 4 and all(node.output) and all(node.input)
    named = [name for node in model.graph.node for name in node.output]
    assert len(named) == len(set(named))
    manifest = read_manifest(tmp_path / "out")
    assert {comparison["runtime"] for comparison in manifest.verification["comparisons"]} == {"kernels"}
    if cache == "none":
        with pytest.raises(InputError, match="was exported with --target tensorrt and has no body"):
            ExportedModel(tmp_path / "out", manifest, "body", threads=1)


@pytest.mark.parametrize("opset", [OPSETS[0], full(OPSETS[-1])])
def test_both_ends_of_the_opsets(wide, sharp_export, tmp_path, opset):
    result = sharp_export(wide("ssa", "nape"), "--norm", "ssa", "--opset", opset, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    path = tmp_path / "out" / "model.onnx"
    onnx.checker.check_model(path, full_check=True)
    model = onnx.load(path, load_external_data=False)
    assert {imported.domain: imported.version for imported in model.opset_import}[""] == opset
    assert read_manifest(tmp_path / "out").opset == opset


def test_the_longest_context_is_the_users(wide, sharp_export, tmp_path):
    result = sharp_export(wide(), "--norm", "softmax", "--max-context", 40, "--dry-run", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "context 40" in result.output


def test_learned_positions_end_the_context(sharp_export, tmp_path):
    source = save(tiny("gpt2"), tmp_path / "gpt2")
    result = sharp_export(source, "--norm", "softmax", "--max-context", 129, "--dry-run", "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert "the model has learned 128 positions" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--block-size", 24), "--block-size is 24, but must be a multiple of 16 up to 1024"),
        (("--max-context", 0), "--max-context is 0, but must be from 1 to 16777216"),
        (("--opset", 17), "--opset is 17, but must be from 18 to"),
        (("--cache", "none", "--kv-dtype", "int8"), "--kv-dtype is for --cache paged"),
        (("--cache", "contiguous", "--block-size", 64), "--block-size is for --cache paged"),
        (("--target", "portable", "--kv-dtype", "int8"), "--kv-dtype int8 needs Sharp's kernels"),
        (("--target", "portable", "--kv-dtype", "fp8"), "--kv-dtype fp8 needs Sharp's kernels"),
        (("--key-screen", "int8", "--kv-dtype", "fp8"), "--key-screen int8 is for --cache paged"),
        (("--target", "portable", "--quantize", "int4"), "--quantize int4 uses ONNX Runtime's own op MatMulNBits"),
        (("--dtype", "float16", "--quantize", "int4"), "--quantize int4 is for --dtype float32"),
        (("--target", "tensorrt", "--quantize", "int8"), "leave --target tensorrt out; `sharp build` takes the"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(checkpoint, sharp_export, tmp_path, options, message):
    result = sharp_export(checkpoint("softmax"), "--norm", "softmax", *options, "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()
