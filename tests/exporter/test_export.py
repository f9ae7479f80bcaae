"""`sharp-export` on checkpoints of our own and of Hugging Face: what a user gets."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from sharp.models.normalizers import NORMS
from sharp.plugins.manifest import read_manifest

# Every norm once, every position scheme at least twice.
COMBINATIONS = list(zip(NORMS, ("rope", "nape", "alibi", "none") * len(NORMS), strict=False))


@pytest.mark.parametrize(("norm", "positions"), COMBINATIONS)
def test_every_norm_exports_and_agrees_with_pytorch(checkpoint, sharp_export, tmp_path, norm, positions):
    result = sharp_export(checkpoint(norm, positions), "--norm", norm, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    manifest = read_manifest(tmp_path / "out")
    assert (manifest.norm.name, manifest.norm.trained, manifest.positions) == (norm, True, positions)
    comparisons = manifest.verification["comparisons"]
    assert {comparison["runtime"] for comparison in comparisons} == {"kernels", "inlined"}
    assert all(comparison["logits_error"] < 1e-4 for comparison in comparisons)
    assert "UNTRAINED" not in result.output


def test_pt_checkpoint_and_default_folder(checkpoint, sharp_export, tmp_path, monkeypatch):
    source = checkpoint("ssa", "nape", suffix=".pt")
    monkeypatch.chdir(tmp_path)
    result = sharp_export(source, "--norm", "ssa")
    assert result.exit_code == 0, result.output
    assert {"model.onnx", "model.onnx.data", "sharp.json", "tokenizer.json"} <= {
        file.name for file in (tmp_path / "tiny-ssa").iterdir()
    }


def test_graph_is_what_the_design_says(checkpoint, sharp_export, tmp_path):
    sharp_export(checkpoint("ssa"), "--norm", "ssa", "-o", tmp_path / "out")
    onnx.checker.check_model(str(tmp_path / "out" / "model.onnx"))
    model = onnx.load(tmp_path / "out" / "model.onnx")
    inputs = [value.name for value in model.graph.input]
    assert inputs[:8] == [
        *("input_ids", "positions", "slot_mapping", "block_table", "query_start", "context_lens", "collect_stats"),
        "logits_indices",
    ]
    assert sorted(inputs[8:]) == ["key_cache.0", "key_cache.1", "value_cache.0", "value_cache.1"]
    outputs = [value.name for value in model.graph.output]
    assert outputs[:2] == ["logits", "stats"]
    assert sorted(outputs[2:]) == ["key_cache_out.0", "key_cache_out.1", "value_cache_out.0", "value_cache_out.1"]
    kinds = [(node.domain, node.op_type) for node in model.graph.node]
    assert kinds.count(("ai.sharp", "PagedAttention")) == 2
    assert ("", "RMSNormalization") in kinds
    assert [(function.domain, function.name) for function in model.functions] == [("ai.sharp", "PagedAttention")]
    for node in model.graph.node:
        if node.op_type == "PagedAttention":
            plugin = {
                attribute.name: attribute.s for attribute in node.attribute if attribute.name.startswith("plugin")
            }
            assert plugin == {"plugin_namespace": b"", "plugin_version": b"1"}


def test_untrained_norm_warns_and_works(checkpoint, sharp_export, tmp_path):
    result = sharp_export(checkpoint("softmax"), "--norm", "ssa", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "UNTRAINED NORM" in result.output
    assert not read_manifest(tmp_path / "out").norm.trained


@pytest.fixture
def hugging_face_folder(tmp_path: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=90,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    folder = tmp_path / "llama"
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("norm", ["softmax", "ssa", "ssmax", "adaptive-temperature", "entmax"])
def test_hugging_face_folder(hugging_face_folder, sharp_export, tmp_path, norm):
    result = sharp_export(hugging_face_folder, "--norm", norm, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    manifest = read_manifest(tmp_path / "out")
    assert manifest.norm.trained == (norm == "softmax")
    assert manifest.tokenizer.file is None
    assert manifest.source.architecture == "LlamaForCausalLM"
    assert np.isclose(manifest.max_context, 128)
