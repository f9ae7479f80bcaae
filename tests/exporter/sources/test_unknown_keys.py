"""Unused names in checkpoints end the export if they may change numbers, with a message that names them."""

import pytest

from sharp.core.errors import InputError
from sharp.exporter.sources.unknown_keys import UnusedKeys, changes_numbers, check_keys, tensor_changes_numbers


@pytest.mark.parametrize(
    "name",
    [
        *("entmax_alpha", "initial_alpha", "rope_scaling.mscale", "attnScale", "query_pre_attn_scalar", "n_rope2"),
        *("llama.attention.sliding_window", "tokenizer.ggml.pre", "tokenizer.ggml.eot_token_id", "logit_softcapping"),
        *("model.layers.0.self_attn.k_norm.weight", "lm_head.bias", "transformer.h.0.attn.a", "rope_freqs.weight"),
        *("add_bos_token", "layer_types", "use_qk_norm", "use_parallel_residual", "head_dim_v", "softmax1"),
    ],
)
def test_names_of_what_changes_numbers(name):
    assert changes_numbers(name)


@pytest.mark.parametrize(
    "name",
    [
        *("initializer_range", "vocab_prefixes", "general.author", "iter_num", "license", "tokenizer.ggml.precompiled"),
        *("model_name", "best_val_loss", "created_by", "general.capability", "ropey_name"),
    ],
)
def test_names_of_what_changes_nothing(name):
    assert not changes_numbers(name)


def test_a_name_that_may_change_numbers_is_refused_and_named_with_the_way_out():
    with pytest.raises(InputError) as refused:
        check_keys("folder", "config.json", ["hidden_size", "my_alpha", "my_rope"], used=["hidden_size"])
    said = str(refused.value)
    assert "folder: config.json has 'my_alpha' (and my_rope)" in said
    assert "--ignore-key my_alpha" in said


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *(("model.mystery.weight", True), ("model.layers.0.mlp.up_proj.bias", True), ("model.value_mix", True)),
        *(("transformer.h.0.attn.a", True), ("blk.0.attn_sinks", True), ("model.layers.0.self_attn.x", True)),
        *(("model.layers.0.mlp.statistics", False), ("step", False), ("model.tracker.count", False)),
    ],
)
def test_names_of_tensors_that_change_numbers(name, changes):
    assert tensor_changes_numbers(name) is changes


def test_other_names_and_those_that_the_user_ignores_are_returned():
    found = ["x_author", "a.alpha", "b.alpha", "k_norm.1", "used"]
    assert check_keys("f", "p", found, used=["use?"], harmless={"k_norm.*": "why"}, ignore=["*.alpha"]) == UnusedKeys(
        "p", ("x_author",), ("a.alpha", "b.alpha")
    )
