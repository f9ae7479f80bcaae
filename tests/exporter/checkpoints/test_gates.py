"""Models whose attention has a gate behind it are exported under other norms; layers that are no attention are refused.

`test_architectures.py` compares transformers' gated classes under softmax, `test_authors_models.py` the gates of Qwen3.
"""

import entmax
import numpy as np
import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from sharp.core.manifest import read_manifest
from sharp.exporter.adapt.adapt import adapt
from sharp.exporter.adapt.settings import AdaptSettings
from sharp.exporter.checkpoints.reading import read_source
from sharp.exporter.forms.paged.session import PagedSession
from sharp.models.byte_tokenizer import byte_tokenizer
from sharp.models.gated_qwen3 import GatedQwen3ForCausalLM
from tests.exporter.checkpoints.test_authors_models import CASES
from tests.exporter.greedy import NEW_TOKENS, PROMPT, export
from tests.exporter.tiny_hugging_face import save, tiny
from tests.marks import full

WEIGHTS = {"entmax": entmax.entmax15, "sparsemax": entmax.sparsemax}


def attend_with(norm, entropies):
    """Return attention for transformers' interface by the package `entmax`, which appends entropies to `entropies`."""

    def attend(module, query, key, value, attention_mask=None, *, scaling, sliding_window=None, **_):
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        positions = torch.arange(query.shape[2])
        distance = positions[:, None] - positions
        hidden = (distance < 0) | (distance >= (sliding_window or len(positions)))
        weights = WEIGHTS[norm]((query @ key.mT * scaling).masked_fill(hidden, -1e9), -1)
        entropies.append(torch.special.entr(weights).sum(-1)[0].mT)  # [tokens, heads]
        return (weights @ value).transpose(1, 2).contiguous(), weights

    return attend


@torch.no_grad()
def expected(model: PreTrainedModel, norm: str) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Return greedy tokens, the logits of all tokens but the last, and entropies [layers, tokens, heads]."""
    entropies: list[torch.Tensor] = []
    transformers.AttentionInterface.register("test", attend_with(norm, entropies))
    model.set_attn_implementation("test")
    tokens = torch.from_numpy(PROMPT)
    for _ in range(NEW_TOKENS):
        entropies.clear()
        logits = model(tokens, use_cache=False).logits
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
    return tokens[0].tolist(), logits[0].numpy(), torch.stack(entropies).numpy()


@pytest.mark.parametrize(
    ("name", "norm"),
    [
        ("afmoe", "entmax"),
        full("beam", "entmax"),
        full("lfm3", "sparsemax"),
        full("qwen3_5_text", "entmax"),
        full("qwen3_5_moe_text", "sparsemax"),
        full("qwen3_next", "entmax"),
        full("laguna", "entmax"),
    ],
)
def test_a_gated_model_under_another_norm(sharp_export, tmp_path, name, norm):
    model = tiny(name)
    folder = export(sharp_export, save(model, tmp_path / name), norm, "paged", tmp_path / "out", "--untrained-norm")
    tokens, logits, entropies = expected(model, norm)
    manifest = read_manifest(folder)
    session = PagedSession(folder, manifest, manifest.cache, kernels=True)
    session.reset(1, len(tokens))
    steps = [session.step([np.array(part)]) for part in (tokens[:5], tokens[5:9], *([t] for t in tokens[9:-1]))]
    found = np.concatenate([step[0][0] for step in steps])
    assert np.abs(found - logits).max() <= 2e-4 * np.abs(logits).max()
    assert found[PROMPT.shape[1] - 1 :].argmax(-1).tolist() == tokens[PROMPT.shape[1] :]
    measured = np.concatenate([step[1][0][..., 0] for step in steps], axis=1)
    np.testing.assert_allclose(measured, entropies, atol=2e-4)


@pytest.mark.parametrize("gate", ["headwise_attn_output_gate", full("elementwise_attn_output_gate")])
def test_qwen3_with_gates_is_adapted_and_read_again(tmp_path, gate):
    config = tiny("qwen3").config
    config.vocab_size = 300
    setattr(config, gate, True)
    model = GatedQwen3ForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    save(model, tmp_path / "teacher")
    PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer()).save_pretrained(tmp_path / "teacher")
    (tmp_path / "text.txt").write_text("".join(f"{number} green bottles. " for number in range(1000)))
    text = tmp_path / "text.txt"
    settings = AdaptSettings(norm="ssa", text=(text,), held_out=text, length=24, tokens=24 * 4, rank=4, dtype="float32")
    assert adapt(tmp_path / "teacher", settings, tmp_path / "student") is not None
    source = read_source(tmp_path / "student", None)
    assert (source.trained, source.model.config.norm) == (True, "ssa")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "student").eval()
    assert again.model.layers[0].self_attn.gates == (1 if gate.startswith("head") else 12)
    ids = torch.arange(3, 20)[None]
    torch.testing.assert_close(again(ids).logits, source.model.own_logits(ids))


def test_a_gate_of_qwen3_that_is_neither_on_nor_off_is_refused(sharp_export, tmp_path):
    folder = CASES["gate-headwise"].save(tmp_path / "in", headwise_attn_output_gate="no")
    result = sharp_export(folder, "--norm", "softmax", "-o", tmp_path / "out")
    assert result.exit_code == 2, result.output
    assert "has headwise_attn_output_gate 'no', but it must be true or false" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("model_type", "said"),
    [
        ("qwen3_next", "36 of its 48 layers are linear_attention"),
        ("lfm3", "layers are conv"),
        ("glm_moe_dsa", "layers are indexed_attention"),
        ("llama4_text", "layers are chunked_attention"),
    ],
)
def test_layers_that_are_no_attention_are_refused_by_name(sharp_export, tmp_path, model_type, said):
    CONFIG_MAPPING[model_type]().save_pretrained(tmp_path / "in")
    result = sharp_export(tmp_path / "in", "--norm", "softmax", "-o", tmp_path / "out")
    assert result.exit_code == 2, result.output
    output = " ".join(result.output.split())
    assert said in output
    assert "layers are all full or sliding-window attention" in output
