"""Every supported architecture of Hugging Face computes what transformers computes; other models are refused."""

import json
import logging

import numpy as np
import onnx
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import CodeGenConfig, CodeGenForCausalLM

from sharp.core.manifest import read_manifest
from sharp.exporter.checkpoints.architectures import ARCHITECTURES, Architecture
from sharp.exporter.checkpoints.reading import read_source
from sharp.exporter.forms.contiguous.session import ContiguousSession
from sharp.exporter.forms.uncached.session import UncachedSession
from sharp.exporter.sources.decoder import Decoder
from sharp.exporter.sources.hook import HOOK, hooked_attention
from sharp.models.hugging_face import to_hugging_face
from tests.exporter.conftest import tiny_model
from tests.exporter.greedy import NEW_TOKENS, PROMPT, check_greedy_tokens, export
from tests.exporter.tiny_hugging_face import save, tiny
from tests.full.fuzz.readers import write_gguf
from tests.marks import full

DECODERS = [name for name, architecture in ARCHITECTURES.items() if architecture.kind == "decoder"]
ENCODERS = [name for name, architecture in ARCHITECTURES.items() if architecture.kind == "encoder"]


@pytest.fixture(autouse=True)
def _quiet():
    logging.getLogger("torch").setLevel(logging.WARNING)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_computes_what_transformers_does(tmp_path, name):
    """PyTorch computes the same logits as transformers.

    `tests/full/exporter` exports each architecture and compares tokens.
    """
    model = tiny(name)
    source = read_source(save(model, tmp_path / name), "softmax")  # read_source refuses a model whose logits differ
    assert source.architecture == type(model).__name__
    assert isinstance(source.model, Decoder) == (name in DECODERS)


# Together these architectures have every form, windows and unusual scales. `tests/full/exporter` has all architectures.
@pytest.mark.parametrize(
    ("name", "cache"),
    [("qwen2", "contiguous"), ("gpt2", "none"), ("gpt_oss", "paged")],
)
def test_greedy_tokens_equal_transformers(sharp_export, tmp_path, name, cache):
    manifest = check_greedy_tokens(sharp_export, tmp_path, name, cache)
    assert manifest.positions == ARCHITECTURES[name].positions


@pytest.mark.parametrize(
    ("name", "norm"), [full("gemma2", "ssa"), full("gpt2", "entmax"), ("mistral", "ssmax"), full("bert", "ssa")]
)
def test_other_norms(sharp_export, tmp_path, name, norm):
    cache = "none" if name in ENCODERS else "paged"
    folder = export(sharp_export, save(tiny(name), tmp_path / name), norm, cache, tmp_path / "out", "--untrained-norm")
    # the export is verified against PyTorch with the same window, cap and scale
    assert read_manifest(folder).norm.name == norm


@pytest.mark.full
def test_a_fixed_temperature_divides_capped_logits(sharp_export, tmp_path, monkeypatch):
    model = tiny("gemma2")
    for layer in model.model.layers:  # large weights make the logits reach the cap
        layer.self_attn.q_proj.weight.data *= 30
    source = save(model, tmp_path / "gemma2")
    options = ("--temperature", "2", "--untrained-norm")
    folder = export(sharp_export, source, "fixed-temperature", "none", tmp_path / "out", *options)
    [found] = UncachedSession(folder, kernels=True).run([PROMPT])
    softmax = torch.nn.functional.softmax
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda logits, **rest: softmax(logits / 2, **rest))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        target = model(torch.from_numpy(PROMPT)).logits[0].numpy()
    assert np.abs(found - target).max() < 1e-4 * np.abs(target).max()


@pytest.mark.parametrize("mapped", [False, full(True)])
def test_a_scale_that_would_end_at_a_soft_cap_is_refused(sharp_export, tmp_path, mapped):
    norm_map = tmp_path / "norms.toml"
    norm_map.write_text("[[norms]]\nlayers = [0]\nheads = [0, 1]\nnorm = 'ssmax-bias'\n")
    options = (
        ("--norm", "softmax", "--norm-map", norm_map, "--untrained-norm")
        if mapped
        else ("--norm", "ssmax-bias", "--untrained-norm")
    )
    result = sharp_export(save(tiny("gemma2"), tmp_path / "gemma2"), *options, "-o", tmp_path / "out")
    assert result.exit_code == 2, result.output
    assert "its logits are capped, and norm ssmax-bias would scale them before that" in result.output


def test_experts_in_mxfp4_are_the_numbers_that_they_stand_for(sharp_export, tmp_path):
    """Experts in gpt-oss's MXFP4 are decoded: two 4-bit numbers per byte, the lower first, and one exponent per 32."""
    folder = save(tiny("gpt_oss", hidden_size=64, intermediate_size=32), tmp_path / "gpt-oss")
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = weights.pop(name).shape
        weights[f"{name}_blocks"] = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        weights[f"{name}_scales"] = torch.randint(120, 124, (experts, outputs, inputs // 32), dtype=torch.uint8)
    blocks, scales = (
        weights[f"model.layers.0.mlp.experts.gate_up_proj_{name}"][0, 3, 1] for name in ("blocks", "scales")
    )
    blocks[0] = 0xD2  # the 4-bit codes of 1.0 and -3.0
    scales.fill_(126)  # the exponent of the scale 2^-1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(config))
    source = read_source(folder, "softmax")
    experts = source.model.get_parameter("model.model.layers.0.mlp.experts.gate_up_proj")
    assert experts[0, 32:34, 3].tolist() == [0.5, -1.5]
    export(sharp_export, folder, "softmax", "contiguous", tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_list_prints_what_is_supported(sharp_export):
    result = sharp_export("--list")
    assert result.exit_code == 0
    for name in ARCHITECTURES:
        assert name in result.output


def test_a_model_that_bypasses_the_hook_is_refused_with_the_reason(sharp_export, tmp_path, monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, "codegen", Architecture("codegen", "CodeGen"))
    config = CodeGenConfig(vocab_size=90, n_embd=48, n_layer=2, n_head=4, rotary_dim=4, bos_token_id=1, eos_token_id=2)
    CodeGenForCausalLM(config).save_pretrained(tmp_path / "codegen")
    result = sharp_export(tmp_path / "codegen", "--norm", "softmax", "-o", tmp_path / "out")
    assert result.exit_code == 2, result.output
    assert "attention cannot be replaced" in result.output
    assert not (tmp_path / "out").exists()


def test_attention_that_the_op_lacks_is_refused_with_the_reason(sharp_export, tmp_path, monkeypatch):
    def with_bias(module, *arguments, **options):
        return hooked_attention(module, *arguments, **options, position_bias=torch.zeros(6))

    transformers.AttentionInterface.register(HOOK, with_bias)
    try:
        result = sharp_export(save(tiny("llama"), tmp_path / "llama"), "--norm", "softmax", "-o", tmp_path / "out")
    finally:
        transformers.AttentionInterface.register(HOOK, hooked_attention)
    assert result.exit_code == 2, result.output
    assert "uses position_bias, which Sharp's attention op does not have" in result.output


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_rope_that_depends_on_the_length_is_refused(sharp_export, tmp_path, model_type):
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 128}
    parameters = dynamic if model_type == "llama" else {"full_attention": dynamic, "sliding_attention": dynamic}
    facts = {"model_type": model_type, "rope_parameters": parameters, "head_dim": 8}
    (tmp_path / "long").mkdir()
    (tmp_path / "long" / "config.json").write_text(json.dumps(facts))
    result = sharp_export(tmp_path / "long", "--norm", "softmax", "-o", tmp_path / "out")
    assert result.exit_code == 2, result.output
    assert "RoPE of type dynamic" in result.output


@pytest.mark.parametrize("norm", ["ssa", full("asentmax")])
def test_our_own_decoder_in_the_contiguous_form(sharp_export, tmp_path, norm):
    model = to_hugging_face(tiny_model(norm, "nape", tokenizer="none"))
    folder = export(sharp_export, save(model, tmp_path / "mine"), norm, "contiguous", tmp_path / "out")
    batch = np.concatenate([PROMPT, PROMPT + 1])
    expected = model.generate(torch.from_numpy(batch), max_new_tokens=NEW_TOKENS, do_sample=False)
    for kernels in (True, False):
        generated = ContiguousSession(folder, kernels=kernels).generate(batch, NEW_TOKENS)
        np.testing.assert_array_equal(generated, expected[:, PROMPT.shape[1] :].numpy())


def test_contiguous_names_are_those_of_other_tools(sharp_export, tmp_path):
    folder = export(sharp_export, save(tiny("qwen3"), tmp_path / "q"), "softmax", "contiguous", tmp_path / "out")
    manifest = read_manifest(folder)
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    onnx.checker.check_model(folder / "model.onnx", full_check=True)
    for described, values in ((manifest.inputs, model.graph.input), (manifest.outputs, model.graph.output)):
        assert [port.name for port in described] == [value.name for value in values]
    assert {"past_key_values.0.key", "past_key_values.1.value"} <= {port.name for port in manifest.inputs}
    assert {"logits", "present.0.key", "present.1.value"} <= {port.name for port in manifest.outputs}
    past = next(port for port in manifest.inputs if port.name == "past_key_values.0.key")
    assert past.shape == ("batch", 2, "past", 12)


@pytest.mark.parametrize(
    ("name", "changes", "norm", "sees"),
    [
        ("gemma3_text", {"use_bidirectional_attention": True}, "ssa", "backwards"),
        ("bert", {"is_decoder": True}, "entmax", "to both sides"),
    ],
)
def test_a_model_that_attends_in_another_direction_is_refused(sharp_export, tmp_path, name, changes, norm, sees):
    source = save(tiny(name, **changes), tmp_path / name)
    options = ("--norm", norm, "--untrained-norm", *(("--cache", "none") if name == "bert" else ()))
    result = sharp_export(source, *options, "-o", tmp_path / "out")
    assert result.exit_code == 2, result.output
    said = f"with softmax attention that looks {sees} its logits differ from transformers' own"
    assert said in " ".join(result.output.split())


def test_weights_that_the_model_does_not_use_are_named(sharp_export, tmp_path):
    source = save(tiny("llama"), tmp_path / "llama")
    weights = load_file(source / "model.safetensors")
    extra = {"model.layers.0.mlp.statistics": torch.zeros(4)}
    save_file(weights | extra, source / "model.safetensors", {"format": "pt"})
    result = sharp_export(source, "--norm", "softmax", "--dry-run", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "Not used of llama: weights: model.layers.0.mlp.statistics" in " ".join(result.output.split())


def test_a_header_of_a_larger_model_takes_no_memory(sharp_export, tmp_path):
    write_gguf(tmp_path, described_width=2**32 - 1)
    result = sharp_export(tmp_path / "tiny.gguf", "--norm", "softmax", "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert "its header describes 412,316,870,464 weights, and it holds 14,752" in " ".join(result.output.split())


def test_a_configuration_of_a_larger_model_takes_no_memory(sharp_export, tmp_path):
    source = save(tiny("llama"), tmp_path / "llama")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"intermediate_size": 10**12}))
    result = sharp_export(source, "--norm", "softmax", "-o", tmp_path / "out")
    assert result.exit_code == 2, result.output
    said = "its config.json describes 288,000,000,021,168 weights, and its safetensors files hold 39,600"
    assert said in " ".join(result.output.split())
