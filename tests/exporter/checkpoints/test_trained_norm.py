"""`--trained-norm` reads Hugging Face models that were trained with a norm whose parameters have any names."""

import json

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from safetensors.torch import load_file, save_file
from transformers import AttentionInterface, AutoModelForCausalLM, AutoModelForMaskedLM, GPT2LMHeadModel, LlamaConfig

from sharp.core.errors import InputError
from sharp.core.manifest import read_manifest
from sharp.exporter.checkpoints.reading import read_source
from tests.exporter.tiny_hugging_face import SIZES, save, tiny

LAYERS, HEADS = 2, 6
B = torch.linspace(0.3, 2.0, LAYERS * HEADS).reshape(LAYERS, HEADS)
N = torch.linspace(1.1, 2.5, LAYERS * HEADS).reshape(LAYERS, HEADS)
SSA = {
    "norm": "ssa",
    "parameters": {
        "b": {"name": "transformer.h.{layer}.attn.ssa_b", "transform": "exp"},
        "n": "transformer.h.{layer}.attn.ssa_n",
    },
}


def with_weights(folder, weights):
    """Add `weights` to the folder's file of weights, and return the folder."""
    file = folder / "model.safetensors"
    save_file({**load_file(file), **weights}, file, metadata={"format": "pt"})
    return folder


@pytest.fixture
def gpt2_with_ssa(tmp_path):
    weights = {f"transformer.h.{layer}.attn.ssa_b": B[layer].log() for layer in range(LAYERS)}
    weights |= {f"transformer.h.{layer}.attn.ssa_n": N[layer] for layer in range(LAYERS)}
    return with_weights(save(tiny("gpt2"), tmp_path / "gpt2"), weights)


def ssa_logits(model, ids):
    """Return logits of a GPT-2 whose eager attention is SSA, written out by its formula."""

    def attention(module, query, key, value, _mask, scaling=None, **_rest):
        z = (
            query @ key.transpose(-1, -2) * module.scaling
            if scaling is None
            else query @ key.transpose(-1, -2) * scaling
        )
        b, n = (values[module.layer_idx][:, None, None] for values in (B, N))
        scores = (1 + b * z.abs()) ** (torch.where(z < 0, -1.0, 1.0) * n)
        scores = scores * torch.ones(z.shape[-2:]).tril()
        return (scores / scores.sum(-1, keepdim=True) @ value).transpose(1, 2), None

    AttentionInterface.register("written_out", attention)
    model.set_attn_implementation("written_out")
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


@pytest.mark.full
def test_a_gpt2_with_learned_b_and_n_in_every_head(gpt2_with_ssa, sharp_export, tmp_path):
    (tmp_path / "ssa.json").write_text(json.dumps(SSA))
    source = read_source(gpt2_with_ssa, "ssa", trained_norm=tmp_path / "ssa.json")
    assert source.trained
    ids = torch.arange(3, 20)[None]
    expected = ssa_logits(GPT2LMHeadModel.from_pretrained(gpt2_with_ssa), ids)
    torch.testing.assert_close(source.model.own_logits(ids), expected, atol=1e-4, rtol=0)

    result = sharp_export(gpt2_with_ssa, "--trained-norm", tmp_path / "ssa.json", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output  # the export is verified against the logits of the source
    norm = read_manifest(tmp_path / "out").norm
    assert (norm.name, norm.trained) == ("ssa", True)
    model = onnx.load(tmp_path / "out" / "model.onnx")
    nodes = [node for node in model.graph.node if node.domain == "ai.sharp"]
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    assert len(nodes) == LAYERS
    for layer, node in enumerate(nodes):
        np.testing.assert_allclose(stored[node.input[9]], torch.stack([B[layer], N[layer]], -1), rtol=1e-6)


def test_a_roberta_with_b_and_n_in_every_layer(tmp_path):
    folder = save(tiny("roberta"), tmp_path / "roberta")
    attention = "roberta.encoder.layer.{layer}.attention.self."
    with_weights(folder, {f"{attention}a".format(layer=layer): B[layer, 0].log() for layer in range(LAYERS)})
    content = {"norm": "ssa", "parameters": {"b": {"name": f"{attention}a", "transform": "exp"}, "n": 1.5}}
    (tmp_path / "ssa.json").write_text(json.dumps(content))
    source = read_source(folder, "ssa", trained_norm=tmp_path / "ssa.json")
    ids = torch.tensor([[5, 9, 30, 31, 7], [6, 8, 1, 1, 1]])
    mask = (ids != 1).long()

    def written_out(module, query, key, value, _mask, scaling=None, **_rest):
        z = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        scores = (1 + B[module.layer_idx, 0] * z.abs()) ** (torch.where(z < 0, -1.0, 1.0) * 1.5) * mask[:, None, None]
        return (scores / scores.sum(-1, keepdim=True) @ value).transpose(1, 2), None

    AttentionInterface.register("written_out", written_out)
    model = AutoModelForMaskedLM.from_pretrained(folder, attn_implementation="written_out")
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        found = (source.model.eager(ids, mask)[0], source.model.own_output(ids, mask))
    for logits in found:
        torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()], atol=1e-4, rtol=0)


def test_the_file_may_be_an_entry_of_the_configuration(gpt2_with_ssa):
    file = gpt2_with_ssa / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "trained_norm": SSA}))
    assert read_source(gpt2_with_ssa, "ssa").trained


def test_weights_that_look_like_a_norms_are_an_error(gpt2_with_ssa, sharp_export, tmp_path):
    for options in (("--norm", "softmax"), ("--norm", "ssa", "--untrained-norm")):
        result = sharp_export(gpt2_with_ssa, *options, "-o", tmp_path / "out")
        assert result.exit_code == 2
        message = " ".join(result.output.split())
        assert "weights has 'transformer.h.0.attn.ssa_b'" in message
        assert "if it is what a norm has learned, say so with --trained-norm FILE" in message
    (tmp_path / "softmax.json").write_text(json.dumps({"norm": "softmax", "ignore": ["*.ssa_?"]}))
    read_source(gpt2_with_ssa, "softmax", trained_norm=tmp_path / "softmax.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm": "sofmax"}, "norm 'sofmax' is not known"),
        ({"norm": "entmax"}, "names the parameter 'b'; norm entmax has no parameters"),
        ({"parameters": {"b": 1.0}}, "does not say the parameter 'n'; norm ssa has b, n"),
        ({"parameters": {"b": 1.0, "n": "h.{layer}.n"}}, "names the weights 'h.0.n', which"),
        ({"parameters": {"b": 1.0, "n": 0.0}}, "ssa has b and n above 0, but here b 1, n 0"),
        ({"parameters": {"b": 1.0, "n": 0.5}}, "weights has 'transformer.h.0.attn.ssa_b'"),
        ({"parameters": {"b": 1.0, "n": "transformer.h.{layer}.ln_1.weight"}}, "has shape [48], but must have [6]"),
        ({"alfa": 2.0}, "alfa: Extra inputs are not permitted"),
    ],
)
def test_files_that_do_not_fit_are_refused(gpt2_with_ssa, tmp_path, change, message):
    (tmp_path / "ssa.json").write_text(json.dumps({**SSA, **change}))
    with pytest.raises(InputError) as refused:
        read_source(gpt2_with_ssa, "ssa", trained_norm=tmp_path / "ssa.json")
    assert message in str(refused.value)


def test_what_was_trained_by_the_hook_is_exported_without_a_flag(sharp_export, tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_key_value_heads=2)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sharp-asentmax")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path / "trained")
    result = sharp_export(tmp_path / "trained", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    norm = read_manifest(tmp_path / "out").norm
    assert (norm.name, norm.trained) == ("asentmax", True)
