"""Models whose heads have attention sinks: gpt-oss and similar architectures."""

from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from sharp.core.manifest import read_manifest
from sharp.exporter.forms.uncached.session import UncachedSession
from sharp.exporter.inspection.attention_map import attention_map
from sharp.exporter.inspection.heads import head_statistics
from sharp.exporter.inspection.inspection import open_model
from tests.exporter.greedy import PROMPT, export
from tests.exporter.tiny_hugging_face import save, tiny
from tests.marks import full

MIXED = """
[[norms]]
layers = [0]
heads = [0, 3]
norm = "ssa"

[[norms]]
layers = [1]
heads = [1, 4, 5]
norm = "entmax"
"""


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    """Save a model whose heads have sinks of very different sizes, and return its folder."""
    model = tiny("gpt_oss")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.copy_(torch.tensor([-5.0, -1.0, 0.0, 1.0, 3.0, 8.0]))
    return save(model, tmp_path_factory.mktemp("models") / "gpt_oss")


def test_sinks_are_a_column_of_head_params(sharp_export, gpt_oss, tmp_path):
    folder = export(sharp_export, gpt_oss, "softmax", "none", tmp_path / "out")
    model = onnx.load(folder / "model.onnx")
    given = [node.input[7] for node in model.graph.node if node.domain == "ai.sharp"]
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer if tensor.name in given}
    assert [weights[name].tolist() for name in given] == [[[-5.0], [-1.0], [0.0], [1.0], [3.0], [8.0]]] * 2


@pytest.mark.parametrize("norm", ["entmax", *map(full, ("ssa", "adaptive-temperature", "ssmax", "sparsemax"))])
def test_other_norms(sharp_export, gpt_oss, tmp_path, norm):
    folder = export(sharp_export, gpt_oss, norm, "paged", tmp_path / "out", "--untrained-norm")
    assert read_manifest(folder).norm.name == norm  # the export is verified against PyTorch, with kernels and without


@pytest.mark.full
@pytest.mark.parametrize(
    "options", [("--dtype", "float16"), ("--dtype", "bfloat16"), ("--quantize", "int8", "--kv-dtype", "int8")], ids=str
)
def test_half_precision_and_quantization(sharp_export, tmp_path, options):
    # The model has no experts: in a small random model, rounding sometimes sends a token to other experts, with sinks
    # or without.
    source = save(tiny("granite_swa"), tmp_path / "granite_swa")
    export(sharp_export, source, "softmax", "paged", tmp_path / "out", *options)  # the export also verifies


@pytest.mark.full
def test_a_norm_map_keeps_the_sinks_of_all_heads(sharp_export, gpt_oss, tmp_path):
    (tmp_path / "map.toml").write_text(MIXED)
    options = ("--norm-map", tmp_path / "map.toml", "--untrained-norm")
    mapped = export(sharp_export, gpt_oss, "softmax", "none", tmp_path / "mapped", *options)
    plain = export(sharp_export, gpt_oss, "softmax", "none", tmp_path / "plain")
    [one], [other] = (UncachedSession(folder, kernels=True).run([PROMPT]) for folder in (mapped, plain))
    assert np.abs(one - other).max() > 1e-3


@pytest.mark.parametrize("kernels", [True, False])
def test_the_statistics_have_the_mass_of_the_sinks(sharp_export, gpt_oss, tmp_path, kernels):
    folder = export(sharp_export, gpt_oss, "softmax", "none", tmp_path / "out")
    manifest = read_manifest(folder)
    assert manifest.stats_columns == 5
    port = next(port for port in manifest.outputs if port.name == "stats")
    assert port.shape[-1] == 5 and port.doc.endswith("logit spread, the sink's mass")
    _, stats = UncachedSession(folder, kernels=kernels).run_with_stats([PROMPT])  # [layers, 1, q_heads, tokens, 5]
    model = tiny("gpt_oss").from_pretrained(gpt_oss, attn_implementation="eager")
    with torch.no_grad():
        weights = model(torch.from_numpy(PROMPT), output_attentions=True).attentions
    for layer, of_layer in enumerate(weights):
        np.testing.assert_allclose(stats[layer, ..., 4], 1 - of_layer.sum(-1).numpy(), atol=1e-5)


def test_the_mass_is_the_same_in_a_folder_a_checkpoint_and_a_folder_of_before(sharp_export, gpt_oss, tmp_path):
    folder = export(sharp_export, gpt_oss, "softmax", "paged", tmp_path / "out")
    assert read_manifest(folder).stats_columns == 5
    records = open_model(folder).record(PROMPT[0])
    before = [replace(record, stats=record.stats[..., :4]) for record in records]
    found = head_statistics(records, "folder").sink
    np.testing.assert_allclose(found, head_statistics(before, "folder").sink, atol=1e-6)
    of_checkpoint = head_statistics(open_model(gpt_oss).record(PROMPT[0]), "checkpoint").sink
    np.testing.assert_allclose(found, of_checkpoint, atol=1e-5)


@pytest.mark.parametrize("norm", ["sigmoid", "relu2"])
def test_a_norm_without_competition_is_refused(sharp_export, gpt_oss, tmp_path, norm):
    result = sharp_export(gpt_oss, "--norm", norm, "--untrained-norm", "-o", tmp_path / "out")
    assert result.exit_code == 2, result.output
    assert f"has attention sinks, which compete with its keys, and --norm {norm} has no place for them" in result.output


def test_such_a_norm_of_some_heads_is_refused(sharp_export, gpt_oss, tmp_path):
    (tmp_path / "map.toml").write_text(MIXED.replace("entmax", "relu"))
    options = ("--norm", "softmax", "--norm-map", tmp_path / "map.toml", "--untrained-norm")
    result = sharp_export(gpt_oss, *options, "-o", tmp_path / "out")
    assert result.exit_code == 2, result.output
    assert "the model has attention sinks, which compete with its keys, and under relu" in result.output


def test_inspect_shows_the_weights_of_transformers(gpt_oss):
    (record, _) = open_model(gpt_oss).record(PROMPT[0])
    model = tiny("gpt_oss").from_pretrained(gpt_oss, attn_implementation="eager")
    with torch.no_grad():
        weights = model(torch.from_numpy(PROMPT), output_attentions=True).attentions[0][0].numpy()
    for head in range(6):
        np.testing.assert_allclose(attention_map(record, 0, head).weights, weights[head], atol=1e-5)
    assert weights[5].sum(-1).max() < 0.1  # head 5's sink takes nearly all weight
    assert (record.stats[5:, 5, 0] > 0.5).all()  # the entropy is that of the other keys


def test_a_norm_of_transformers_attention_has_them_too(gpt_oss):
    model = tiny("gpt_oss").from_pretrained(gpt_oss, attn_implementation="sharp-ssa")
    with_sinks = model(torch.from_numpy(PROMPT)).logits
    for layer in model.model.layers:
        layer.self_attn.sinks.data.fill_(-torch.inf)
    assert (model(torch.from_numpy(PROMPT)).logits - with_sinks).abs().max() > 1e-3
