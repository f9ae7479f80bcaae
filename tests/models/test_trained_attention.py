"""Models of transformers train with a norm through `attn_implementation="sharp-NORM"`, and are saved with it."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

import sharp.models.hugging_face  # noqa: F401 - registers the implementations
from sharp.core.errors import InputError
from sharp.models.adapted_model import attention_norms
from sharp.models.query_scale import mean_log_length

SIZES = {"vocab_size": 90, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64}
GPT2 = {**SIZES, "n_positions": 64, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
IDS = torch.arange(3, 27).reshape(2, 12)


def made(norm, kind="llama"):
    torch.manual_seed(0)
    config = LlamaConfig(**LLAMA) if kind == "llama" else GPT2Config(**GPT2)
    return AutoModelForCausalLM.from_config(config, attn_implementation=f"sharp-{norm}")


@pytest.mark.parametrize(
    ("norm", "kind", "learned"),
    [
        ("ssa", "gpt2", 2),
        ("asentmax", "llama", 4),
        ("sentmax", "gpt2", 2),
        ("ssmax", "llama", 1),
        ("entmax", "llama", 0),
        ("adaptive-temperature", "gpt2", 0),
    ],
)
def test_its_parameters_are_trained_saved_and_loaded_with_the_model(norm, kind, learned, tmp_path):
    model = made(norm, kind)
    own = {name: one for name, one in model.named_parameters() if ".sharp_norm." in name}
    assert len(own) == 2 * learned
    before = {name: one.detach().clone() for name, one in own.items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    assert all(not torch.equal(one, before[name]) for name, one in own.items())

    model.eval().save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["attention_norm"]["norm"] == norm
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)  # without attn_implementation
    assert loaded.config._attn_implementation == f"sharp-{norm}"
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_a_model_of_softmax_gets_the_norms_start_values(tmp_path):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA)).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sharp-ssmax")
    for norm in attention_norms(model):
        torch.testing.assert_close(norm.query_scale.s, torch.full((4,), 1 / mean_log_length(64)))
    ssa = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sharp-ssa")
    for norm in attention_norms(ssa):
        torch.testing.assert_close(norm.head_params(), torch.tensor([[1.0, 1.5]] * 4))


def test_options_of_the_norm():
    config = LlamaConfig(**LLAMA, attention_norm={"alpha": 1.25})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sharp-entmax")
    assert [norm.described.alpha for norm in attention_norms(model)] == [1.25, 1.25]
    config = LlamaConfig(**LLAMA, attention_norm={"alfa": 1.25})
    with pytest.raises(InputError, match=r"config\.attention_norm has the unknown entry 'alfa'"):
        AutoModelForCausalLM.from_config(config, attn_implementation="sharp-entmax")


def test_dropout_of_attention_weights_is_refused():
    config = LlamaConfig(**LLAMA, attention_dropout=0.1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sharp-entmax").train()
    with pytest.raises(InputError, match="attention weights have no dropout"):
        model(input_ids=IDS)
