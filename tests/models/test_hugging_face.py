"""Sharp's models through transformers: folders, `generate`, caches, padding, tokenizer and loss."""

import json
import subprocess
import sys
from dataclasses import replace
from itertools import cycle
from typing import get_args

import pytest
import torch
import transformers
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

from sharp.core.errors import InputError
from sharp.models.causal_lm import SharpForCausalLM
from sharp.models.checkpoint import load_checkpoint, read_checkpoint
from sharp.models.config import Positions, SharpConfig
from sharp.models.hugging_face import to_hugging_face
from sharp.models.masked_lm import SharpForMaskedLM
from sharp.models.norms import NORMS

TINY = SharpConfig(
    vocab_size=50,
    hidden_size=24,
    intermediate_size=40,
    layers=2,
    q_heads=4,
    kv_heads=2,
    head_dim=8,
    positions="nape",
    trained_context=32,
    max_context=256,
)
# Every norm and every scheme of positions occurs at least once. No code depends on both, so not all pairs are needed.
NORMS_AND_POSITIONS = list(zip(NORMS, cycle(get_args(Positions)), strict=False))


@pytest.fixture(autouse=True)
def quiet():
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.enable_progress_bar()


def tiny(**changes) -> SharpForCausalLM | SharpForMaskedLM:
    """Return a model whose weights make its choices clear, and whose learned parameters are off their defaults."""
    torch.manual_seed(0)
    config = replace(TINY, **{"alpha": 0.0, **changes})
    model = (SharpForCausalLM if config.causal else SharpForMaskedLM)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8) if parameter.dim() == 2 else parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, TINY.vocab_size, shape, generator=torch.Generator().manual_seed(1))


def greedy(model: SharpForCausalLM, input_ids: torch.Tensor, new: int) -> torch.Tensor:
    """Append the `new` likeliest tokens one by one, each computed from the whole sequence: greedy decoding."""
    for _ in range(new):
        input_ids = torch.cat([input_ids, model(input_ids)[:, -1:].argmax(-1)], dim=1)
    return input_ids


@pytest.mark.parametrize(("norm", "positions"), NORMS_AND_POSITIONS)
@torch.no_grad()
def test_decoder_comes_back_and_generates_the_same(tmp_path, norm, positions):
    model = tiny(norm=norm, positions=positions, rope_factor=4.0, rope_scaling="llama3", tie_embeddings=norm != "ssa")
    to_hugging_face(model).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    input_ids = tokens(2, 7)
    assert loaded.config.sharp_config == model.config
    assert torch.equal(loaded(input_ids).logits, model(input_ids))
    assert torch.equal(load_checkpoint(tmp_path)(input_ids), model(input_ids))
    expected = greedy(model, input_ids, 8)
    for use_cache in (True, False):
        found = loaded.generate(input_ids, max_new_tokens=8, do_sample=False, use_cache=use_cache, pad_token_id=0)
        assert found.tolist() == expected.tolist()


@pytest.mark.parametrize(("norm", "positions"), NORMS_AND_POSITIONS)
@torch.no_grad()
def test_encoder_comes_back(tmp_path, norm, positions):
    model = tiny(norm=norm, positions=positions, causal=False)
    to_hugging_face(model).save_pretrained(tmp_path)
    input_ids, mask = tokens(2, 7), torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(input_ids, attention_mask=mask).logits, model(input_ids, mask))
    assert torch.equal(read_checkpoint(tmp_path).model(input_ids, mask), model(input_ids, mask))


@pytest.mark.parametrize(("norm", "positions"), NORMS_AND_POSITIONS)
@torch.no_grad()
def test_a_cache_and_padding_change_no_logits(norm, positions):
    model = tiny(norm=norm, positions=positions)
    wrapped = to_hugging_face(model)
    long, short = tokens(1, 9), tokens(1, 6)
    batch = torch.cat([long, torch.cat([torch.full((1, 3), 5), short], dim=1)])
    mask = torch.tensor([[1] * 9, [0] * 3 + [1] * 6])
    first = wrapped(batch[:, :5], attention_mask=mask[:, :5], use_cache=True)
    rest = wrapped(batch[:, 5:], attention_mask=mask, past_key_values=first.past_key_values)
    found = torch.cat([first.logits, rest.logits], dim=1)
    torch.testing.assert_close(found[:1], model(long), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1:, 3:], model(short), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_beams_and_prompts_of_different_length():
    wrapped = to_hugging_face(tiny(norm="asentmax"))
    short = tokens(1, 6)
    batch = torch.cat([torch.cat([torch.full((1, 3), 5), short], dim=1), tokens(1, 9)])
    mask = torch.tensor([[0] * 3 + [1] * 6, [1] * 9])
    settings = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False, "pad_token_id": 0}
    together = wrapped.generate(batch, attention_mask=mask, **settings)
    assert together[0, 9:].tolist() == wrapped.generate(short, **settings)[0, 6:].tolist()


@torch.no_grad()
def test_generation_ends_where_the_configuration_says(tmp_path):
    prompt = tokens(1, 7)
    last = greedy(tiny(), prompt, 3)[0, -1].item()
    to_hugging_face(tiny(eos_token_ids=(last,), bos_token_id=2)).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.generation_config.bos_token_id == 2
    assert loaded.generate(prompt, max_new_tokens=8, do_sample=False)[0, -1] == last


@torch.no_grad()
def test_bytes_have_their_tokenizer_beside_them(tmp_path):
    to_hugging_face(tiny(vocab_size=257, tokenizer="bytes")).save_pretrained(tmp_path / "bytes")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "bytes")
    assert tokenizer("aé").input_ids == [97, 195, 169]
    assert tokenizer.decode([97, 195, 169]) == "aé"
    assert tokenizer.eos_token_id == 256
    assert tokenizer.padding_side == "left"
    to_hugging_face(tiny()).save_pretrained(tmp_path / "none")
    assert not (tmp_path / "none" / "tokenizer.json").exists()


@torch.no_grad()
def test_losses_are_the_usual_ones():
    input_ids = tokens(2, 7)
    labels = input_ids.clone()
    labels[0, 3:] = -100
    decoder, encoder = tiny(), tiny(causal=False)
    torch.testing.assert_close(
        to_hugging_face(decoder)(input_ids, labels=labels).loss,
        functional.cross_entropy(decoder(input_ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()),
    )
    torch.testing.assert_close(
        to_hugging_face(encoder)(input_ids, labels=labels).loss,
        functional.cross_entropy(encoder(input_ids).flatten(0, 1), labels.flatten()),
    )


def test_a_wrapper_trains_the_model_it_was_made_from():
    model = tiny()
    to_hugging_face(model)(tokens(1, 7), labels=tokens(1, 7)).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_shards(tmp_path):
    model = tiny(norm="ssa")
    to_hugging_face(model).save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert torch.equal(load_checkpoint(tmp_path)(tokens(1, 5)), model(tokens(1, 5)))


@pytest.mark.parametrize("norm", NORMS)
@torch.no_grad()
def test_half_precision_rounds_weights_but_not_positions(tmp_path, norm):
    model = tiny(norm=norm, q_heads=6, kv_heads=6)  # six heads, so that one ALiBi slope is no power of two
    to_hugging_face(model).save_pretrained(tmp_path)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="bfloat16")
    assert torch.equal(half.model.blocks[0].attention.slopes, model.blocks[0].attention.slopes)
    assert half(tokens(1, 9)).logits.dtype == torch.bfloat16
    assert half(tokens(1, 9)).logits.isfinite().all()


def test_a_model_from_its_configuration_alone_is_ready_to_train(tmp_path):
    to_hugging_face(tiny(positions="rope")).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(config)
    assert 0.01 < model.get_input_embeddings().weight.std() < 0.03
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert (config.vocab_size, config.num_hidden_layers, config.num_attention_heads) == (50, 2, 4)


def test_a_folder_of_the_other_kind_is_refused(tmp_path):
    to_hugging_face(tiny(causal=False)).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="encoder"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(InputError, match="holds a SharpForMaskedLM"):
        load_checkpoint(tmp_path)


def test_input_that_the_model_cannot_take_is_refused():
    wrapped = to_hugging_face(tiny())
    with pytest.raises(InputError, match="StaticCache"):
        wrapped.generate(tokens(1, 4), max_new_tokens=2, cache_implementation="static", pad_token_id=0)
    with pytest.raises(InputError, match=r"\[1, 3\].*\[1, 4\]"):
        wrapped(tokens(1, 4), attention_mask=torch.ones(1, 3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.update(model_type="llama"), "model_type 'sharp'"),
        (lambda content: content.pop("sharp"), "incomplete"),
        (lambda content: content["sharp"].update(version=3), "version 3, this Sharp reads 2"),
        (lambda content: content["sharp"]["config"].update(colour="red"), "unknown configuration field 'colour'"),
        (lambda content: content["sharp"]["config"].update(norm="entmax"), "too many"),
        (lambda content: content["sharp"]["config"].update(layers=3), "lacks"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(tmp_path, change, message):
    to_hugging_face(tiny(norm="ssa")).save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    change(content)
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=message):
        load_checkpoint(tmp_path)


def test_a_folder_with_damaged_weights_is_refused(tmp_path):
    to_hugging_face(tiny()).save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(InputError, match=r"model\.safetensors is damaged"):
        load_checkpoint(tmp_path)
    weights.unlink()
    with pytest.raises(InputError, match="incomplete"):
        load_checkpoint(tmp_path)


def test_transformers_is_an_import_of_one_module_only():
    code = "import sys, sharp.models.checkpoint, sharp.models.masked_lm; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
