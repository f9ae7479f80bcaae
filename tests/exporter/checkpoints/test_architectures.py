"""Every Hugging Face architecture in every form: what the folder says is what transformers says, token for token."""

import json
import logging
import os

import numpy as np
import onnx
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import CodeGenConfig, CodeGenForCausalLM

from sharp.exporter.checkpoints.architectures import ARCHITECTURES, Architecture
from sharp.exporter.checkpoints.hook import HOOK, hooked_attention
from sharp.exporter.forms.contiguous.session import ContiguousSession
from sharp.exporter.forms.paged.session import PagedSession
from sharp.exporter.forms.uncached.session import UncachedSession
from sharp.models.hugging_face import to_hugging_face
from sharp.plugins.manifest import read_manifest
from tests.exporter import support_table
from tests.exporter.conftest import tiny_model
from tests.exporter.tiny_hugging_face import VARYING, save, tiny
from tests.full.fuzz.readers import write_gguf

DECODERS = [name for name, architecture in ARCHITECTURES.items() if architecture.kind == "decoder"]
ENCODERS = [name for name, architecture in ARCHITECTURES.items() if architecture.kind == "encoder"]
PROMPT = np.array([[5, 17, 30, 44, 8, 61, 72, 19, 3, 88, 12]])
NEW_TOKENS = 12
SEEN: support_table.Seen = {}


@pytest.fixture(autouse=True)
def _quiet():
    logging.getLogger("torch").setLevel(logging.WARNING)


def export(sharp_export, source, norm, cache, folder, *options):
    result = sharp_export(source, "--norm", norm, "--cache", cache, *options, "-o", folder)
    assert result.exit_code == 0, result.output
    return folder


def greedy_of_transformers(model) -> list[int]:
    model.set_attn_implementation("eager")
    output = model.generate(
        torch.from_numpy(PROMPT), max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0,
        eos_token_id=None,
    )  # fmt: skip
    return output[0, PROMPT.shape[1] :].tolist()


def greedy(folder, cache: str, config) -> list[int]:
    if cache == "contiguous":
        return ContiguousSession(folder, kernels=True).generate(PROMPT, NEW_TOKENS)[0].tolist()
    tokens = PROMPT[0].tolist()
    if cache == "none":
        session = UncachedSession(folder, kernels=True)
        for _ in range(NEW_TOKENS):
            tokens.append(int(session.run([np.array([tokens])])[0, -1].argmax()))
    else:
        session = PagedSession(folder, config, read_manifest(folder).cache, kernels=True)
        session.reset(1, len(tokens) + NEW_TOKENS)
        following = np.array(tokens)
        for _ in range(NEW_TOKENS):
            (logits,), _ = session.step([following])
            following = logits[-1:].argmax(-1)
            tokens.append(int(following[0]))
    return tokens[PROMPT.shape[1] :]


def windows_of(config, max_context: int) -> tuple[int, ...]:
    if not getattr(config, "sliding_window", None):
        return ()
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return tuple(config.sliding_window if one == "sliding_attention" else max_context for one in types)


@pytest.mark.parametrize(("name", "cache"), [one for one in sorted(support_table.expected()) if one[0] in DECODERS])
def test_greedy_tokens_equal_transformers(sharp_export, tmp_path, name, cache):
    # Tracing takes longest; several layers that are alike go through the paged form.
    model = tiny(name) if cache == "paged" or name in VARYING else tiny(name, num_hidden_layers=1)
    folder = export(sharp_export, save(model, tmp_path / name), "softmax", cache, tmp_path / "out")
    manifest = read_manifest(folder)
    assert (manifest.source.architecture, manifest.cache.form) == (type(model).__name__, cache)
    assert manifest.positions == ARCHITECTURES[name].positions
    assert manifest.windows == windows_of(model.config, manifest.max_context)
    assert greedy(folder, cache, manifest) == greedy_of_transformers(model)
    SEEN[name, cache] = f"{NEW_TOKENS} tokens"


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_equal_transformers(sharp_export, tmp_path, name):
    model = tiny(name)
    folder = export(sharp_export, save(model, tmp_path / name), "softmax", "none", tmp_path / "out")
    manifest = read_manifest(folder)
    assert (manifest.kind, manifest.positions) == ("encoder", ARCHITECTURES[name].positions)
    names = [port.name for port in manifest.inputs]
    assert ("token_type_ids" in names) == (name == "bert")
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(2, model.config.vocab_size, (3, 9), generator=generator)
    mask = (torch.arange(9) < torch.tensor([[9], [4], [1]])).long()
    inputs = {"input_ids": torch.where(mask.bool(), tokens, model.config.pad_token_id), "attention_mask": mask}
    if name == "bert":
        inputs["token_type_ids"] = torch.randint(2, (3, 9), generator=generator)
    with torch.no_grad():
        target = model(**inputs).logits[mask.bool()]
    fed = [inputs[port].numpy() for port in names if port in inputs]
    found = UncachedSession(folder, kernels=True).run(fed)[mask.bool().numpy()]
    assert np.abs(found - target.numpy()).max() < 1e-4 * target.abs().max()
    SEEN[name, "none"] = "logits"


def test_readme_says_what_was_just_seen():
    if SEEN.keys() != support_table.expected():
        pytest.skip("not every architecture was tested in this run")
    table = support_table.table(SEEN)
    if os.environ.get("SHARP_UPDATE_TABLE"):
        support_table.write(table)
    assert support_table.written() == table


@pytest.mark.parametrize(
    ("name", "norm"), [("gemma2", "ssa"), ("gpt2", "entmax"), ("mistral", "ssmax"), ("bert", "ssa")]
)
def test_other_norms(sharp_export, tmp_path, name, norm):
    cache = "none" if name in ENCODERS else "paged"
    folder = export(sharp_export, save(tiny(name), tmp_path / name), norm, cache, tmp_path / "out", "--untrained-norm")
    assert read_manifest(folder).norm.name == norm  # verified against PyTorch with the same window, cap and scale


def test_a_fixed_temperature_divides_capped_logits(sharp_export, tmp_path, monkeypatch):
    model = tiny("gemma2")
    for layer in model.model.layers:  # so that the logits reach the cap
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


@pytest.mark.parametrize("mapped", [False, True])
def test_a_scale_that_would_end_at_a_soft_cap_is_refused(sharp_export, tmp_path, mapped):
    norm_map = tmp_path / "norms.toml"
    norm_map.write_text("[[norms]]\nlayers = [0]\nheads = [0, 1]\nnorm = 'ssmax'\n")
    options = (
        ("--norm", "softmax", "--norm-map", norm_map, "--untrained-norm")
        if mapped
        else ("--norm", "ssmax", "--untrained-norm")
    )
    result = sharp_export(save(tiny("gemma2"), tmp_path / "gemma2"), *options, "-o", tmp_path / "out")
    assert result.exit_code == 2, result.output
    assert "its logits are capped, and norm ssmax would scale them before that" in result.output


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
    def with_sinks(module, *arguments, **options):
        return hooked_attention(module, *arguments, **options, s_aux=torch.zeros(6))

    transformers.AttentionInterface.register(HOOK, with_sinks)
    try:
        result = sharp_export(save(tiny("llama"), tmp_path / "sinks"), "--norm", "softmax", "-o", tmp_path / "out")
    finally:
        transformers.AttentionInterface.register(HOOK, hooked_attention)
    assert result.exit_code == 2, result.output
    assert "uses s_aux, which Sharp's attention op does not have" in result.output


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


@pytest.mark.parametrize("norm", ["ssa", "asentmax"])
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
    extra = {"model.layers.0.self_attn.q_proj.bias": torch.zeros(4)}
    save_file(weights | extra, source / "model.safetensors", {"format": "pt"})
    result = sharp_export(source, "--norm", "softmax", "--dry-run", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "that are left out: model.layers.0.self_attn.q_proj.bias" in " ".join(result.output.split())


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
