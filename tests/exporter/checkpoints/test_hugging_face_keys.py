"""Every odd key in the files of a Hugging Face folder is used, harmless, named in the report, or refused."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sharp.core.errors import InputError
from sharp.exporter.checkpoints.reading import read_source
from tests.exporter.tiny_hugging_face import save, tiny


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("saved")
    names = ("llama", "gpt2", "bert", "mistral", "qwen2", "gpt_neox", "gemma3_text")
    return {name: save(tiny(name), root / name) for name in names}


@pytest.fixture
def changed(folders, tmp_path):
    """Return a function that copies a folder and changes entries of one JSON file; the value ... removes a key."""

    def change(name, entries, file="config.json"):
        folder = tmp_path / name
        shutil.copytree(folders[name], folder)
        content = json.loads((folder / file).read_text()) | entries
        (folder / file).write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))
        return folder

    return change


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 32


@pytest.mark.parametrize(
    ("name", "entries", "key"),
    [
        ("llama", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
        ("llama", {"sliding_window": 8}, "sliding_window"),
        ("llama", {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}, "layer_types"),
        ("llama", {"query_pre_attn_scalar": 4}, "query_pre_attn_scalar"),
        ("llama", {"use_qk_norm": True}, "use_qk_norm"),
        ("llama", {"logit_temperature": 2.0}, "logit_temperature"),
        ("llama", {"temperature": 0.5}, "temperature"),
        ("llama", {"residual_multiplier": 0.2}, "residual_multiplier"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "mscale": 0.7}}, "rope_parameters.mscale"),
        ("llama", {"rope_parameters": LLAMA3 | {"attention_factor": 2.0}}, "rope_parameters.attention_factor"),
        ("llama", {"rope_parameters": ..., "rope_scaling": YARN | {"ntk": 2.0}}, "rope_scaling.ntk"),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("gpt2", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("mistral", {"use_sliding_window": False}, "use_sliding_window"),
        ("gpt_neox", {"rotary_pct": 0.5}, "rotary_pct"),  # contradicts rope_parameters, which transformers prefers
        ("llama", {"final_logit_softcapping": 1e4}, "final_logit_softcapping"),
        ("llama", {"norm_type": "layer_norm"}, "norm_type"),
        ("llama", {"position_embedding_type": "absolute"}, "position_embedding_type"),
        ("bert", {"position_embedding_type": "rope"}, "position_embedding_type"),
        ("bert", {"is_causal": True}, "is_causal"),
        ("qwen2", {"attention_bias": False}, "attention_bias"),
        ("llama", {"is_decoder": False}, "is_decoder"),
        ("llama", {"pos_encoding": "alibi"}, "pos_encoding"),
        ("llama", {"normalization": "layernorm1p"}, "normalization"),
        ("llama", {"divisor": 8.0}, "divisor"),
        ("llama", {"score_fn": "cosine"}, "score_fn"),
        ("llama", {"output_gain": 2.0}, "output_gain"),
        ("llama", {"use_logn": True}, "use_logn"),
        ("llama", {"options": {"softmax_scale": 2.0}}, "options.softmax_scale"),
        ("llama", {"scoring_func": "sigmoid"}, "scoring_func"),  # no router has it
    ],
)
def test_a_key_that_would_change_numbers_and_that_nobody_reads_is_refused(changed, name, entries, key):
    folder = changed(name, entries)
    with pytest.raises(InputError, match="which Sharp does not use") as refused:
        read_source(folder, "softmax")
    assert key in str(refused.value)
    assert "--ignore-key" in str(refused.value)
    source = read_source(folder, "softmax", ignore=[f"*{key}", "sliding_window"])
    assert any(key in name for unused in source.unused for name in unused.ignored)


@pytest.mark.parametrize(
    ("name", "entries"),
    [
        ("llama", {"rope_parameters": ..., "rope_scaling": YARN | {"attention_factor": 1.3, "beta_fast": 16}}),
        ("llama", {"rope_parameters": ..., "rope_theta": 500000.0, "rope_scaling": LLAMA3}),
        ("llama", {"rope_parameters": ..., "rope_theta": 1e5, "rope_scaling": {"type": "linear", "factor": 2.0}}),
        (
            "llama",
            {"rope_scaling": None, "rope_interleaved": False, "is_llama_config": True, "torch_dtype": "bfloat16"},
        ),
        (
            "llama",
            {
                "layer_types": ["full_attention"] * 2,
                "pretraining_tp": 2,
                "attention_dropout": 0.1,
                "initializer_range": 0.1,
                "use_cache": False,
            },
        ),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 32768, "layer_types": ..., "max_window_layers": 1}),
        ("gpt2", {"n_ctx": 1024, "summary_use_proj": False, "attn_pdrop": 0.2, "reorder_and_upcast_attn": True}),
        ("bert", {"position_embedding_type": "absolute", "gradient_checkpointing": False}),
        ("gpt_neox", {"rope_parameters": ..., "rotary_pct": 0.25, "rotary_emb_base": 10000}),
        ("llama", {"attention_dropout": 0.0, "hidden_activation": "silu", "layer_norm_eps": 1e-6, "qkv_bias": False}),
        ("llama", {"original_max_position_embeddings": 128, "position_embedding_type": "rope", "n_layer": 2}),
        ("gpt_neox", {"num_key_value_heads": 6}),
        ("llama", {"is_causal": True, "activation": "swiglu", "max_sequence_length": 2048, "model_max_length": 2048}),
        ("llama", {"weight_decay": 0.1, "use_mla": False}),
        ("bert", {"directionality": "bidi", "pooler_fc_size": 768, "output_past": True, "is_causal": False}),
        ("gemma3_text", {"layer_types": ["sliding_attention"] * 2}),  # with RoPE of full layers
    ],
)
def test_keys_of_published_models_that_change_nothing_are_read_without_a_word(changed, name, entries):
    source = read_source(changed(name, entries), "softmax")
    assert not any(unused.unknown or unused.ignored for unused in source.unused)


def test_other_unknown_keys_are_named(changed, folders):
    entries = {"author": "me", "quality": 3, "use_frobnication": True, "colour": "blue"}
    source = read_source(changed("llama", entries), "softmax")
    assert {unused.place: unused.unknown for unused in source.unused}["config.json"] == tuple(sorted(entries))


@pytest.mark.parametrize(
    ("name", "entries", "said"),
    [
        ("llama", {"rope_theta": 5e5}, "rope_theta 500000.0, and 10000.0 for RoPE's scaling"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "two names of one thing"),
        ("gpt2", {"num_attention_heads": 3}, "two names of one thing"),
        ("qwen2", {"max_window_layers": 0, "use_sliding_window": True}, "contradicts its layer_types"),
        ("llama", {"architectures": ["MyLlamaForCausalLM"]}, "is a MyLlamaForCausalLM"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "is a LlamaForSequenceClassification"),
        ("mistral", {"architectures": ["LlamaForCausalLM"]}, "is a LlamaForCausalLM"),
        ("llama", {"auto_map": {"AutoModelForCausalLM": "mine.Model"}}, "names code of the model's own"),
        ("llama", {"hidden_activation": "gelu"}, "hidden_activation 'gelu' and hidden_act 'silu', which are two names"),
        ("llama", {"layer_norm_eps": 1e-3}, "two names of one thing"),
        ("llama", {"text_config": {"hidden_size": 32}}, "that of one part of a larger model"),
        ("llama", {"rope_parameters": ..., "rope_scaling": YARN | {"type": "linear"}}, "type 'linear' and 'yarn'"),
        ("llama", {"rms_norm_eps": -1.0}, "has rms_norm_eps -1.0, which must be above 0"),
        ("llama", {"rms_norm_eps": float("nan")}, "has rms_norm_eps nan, which is no finite number"),
        ("mistral", {"sliding_window": 0}, "has sliding_window 0, which must be above 0"),
        ("llama", {"vocab_size": "90"}, "has vocab_size '90', which must be a whole number"),
        ("llama", {"eos_token_id": [2, "3"]}, "has eos_token_id '3', which must be the number of a token"),
    ],
)
def test_a_folder_that_says_two_things_is_refused(changed, name, entries, said):
    with pytest.raises(InputError) as refused:
        read_source(changed(name, entries), "softmax")
    assert said in str(refused.value)


def test_a_key_that_stands_twice_and_a_byte_order_mark_are_refused(changed):
    folder = changed("llama", {})
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(f'{{"vocab_size": 91, {text.lstrip()[1:]}')
    with pytest.raises(InputError, match="has the key 'vocab_size' twice"):
        read_source(folder, "softmax")
    (folder / "config.json").write_text(text, encoding="utf-8-sig")
    with pytest.raises(InputError, match="byte order mark"):
        read_source(folder, "softmax")


@pytest.mark.parametrize("entries", [{"eos_token_id": [2, "3"]}, {"num_return_sequences": 3}], ids=str)
def test_generation_settings_that_nobody_can_read_are_named(changed, entries):
    with pytest.raises(InputError, match=rf"generation_config\.json .*{next(iter(entries))}"):
        read_source(changed("llama", entries, "generation_config.json"), "softmax")


def test_code_of_the_models_own_and_its_class_can_be_ignored(changed):
    entries = {"auto_map": {"AutoModelForCausalLM": "mine.Model"}, "architectures": ["MyLlamaForCausalLM"]}
    read_source(changed("llama", entries), "softmax", ignore=["auto_map", "architectures"])


@pytest.mark.parametrize(
    "entries",
    [
        {"guidance_scale": 3.0},
        {"suppress_tokens": [5]},
        {"begin_suppress_tokens": [5]},
        {"bad_words_ids": [[5]]},
        {"stop_strings": ["END"]},
        {"min_new_tokens": 4},
        {"no_repeat_ngram_size": 3},
        {"typical_p": 0.2},
        {"presence_penalty": 1.5},
        {"token_healing": True},
        {"stop": ["END"]},
    ],
    ids=str,
)
def test_generation_settings_that_no_server_obeys_are_refused(changed, entries):
    kept = {"temperature": 0.5, "do_sample": True, "max_length": 99, "num_beam_groups": 2, "my_note": "x"}
    folder = changed("llama", kept | entries, "generation_config.json")
    with pytest.raises(InputError, match=next(iter(entries))):
        read_source(folder, "softmax")
    source = read_source(folder, "softmax", ignore=list(entries))
    names = {unused.place: unused for unused in source.unused}["generation_config.json"]
    assert names.unknown == ("my_note",)


def test_a_search_over_beams_is_refused_with_what_belongs_to_it(changed):
    folder = changed("llama", {"num_beams": 4, "length_penalty": 2.0}, "generation_config.json")
    with pytest.raises(InputError, match=r"'length_penalty' \(and num_beams\)"):
        read_source(folder, "softmax")


@pytest.mark.parametrize(
    "weight",
    [
        "lm_head.bias",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.mlp.gate_proj.bias",
        "rope_freqs.weight",
        "model.mystery.weight",
        "model.layers.2.mlp.up_proj.weight",
    ],
)
def test_weights_that_the_class_has_no_place_for_are_refused(changed, weight):
    folder = changed("llama", {})
    tensors = load_file(folder / "model.safetensors")
    tensors[weight] = tensors["model.norm.weight"] * 2
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=f"weights has '{weight}'"):
        read_source(folder, "softmax")
    source = read_source(folder, "softmax", ignore=[weight])
    assert {unused.place: unused for unused in source.unused}["weights"].ignored == (weight,)
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors", {"softmax_scale": "2"})
    with pytest.raises(InputError, match="softmax_scale"):
        read_source(folder, "softmax", ignore=[weight])


BUFFERS = [
    ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq", 1e4 ** -(torch.arange(4) / 4), torch.rand(4)),
    ("gpt2", "transformer.h.0.attn.bias", torch.ones(1, 1, 64, 64).tril(), torch.ones(1, 1, 64, 64).tril().triu(-4)),
    ("gpt2", "transformer.h.1.attn.masked_bias", torch.tensor(-1e4), torch.tensor(-2.0)),
    ("bert", "bert.embeddings.position_ids", torch.arange(64)[None], torch.arange(64).flip(0)[None]),
]


@pytest.mark.parametrize(("name", "buffer", "computed", "other"), BUFFERS, ids=[buffer for _, buffer, *_ in BUFFERS])
def test_masks_angles_and_positions_that_are_stored_are_compared_with_the_models_own(
    changed, name, buffer, computed, other
):
    folder = changed(name, {})
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {buffer: computed}, folder / "model.safetensors", {"format": "pt"})
    assert not any(unused.unknown or unused.ignored for unused in read_source(folder, "softmax").unused)
    save_file(weights | {buffer: other}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=f"weights has '{buffer}'"):
        read_source(folder, "softmax")


def stored(folder, **others):
    """Add `others` to the weights of a folder, or replace weights of the same name; return the old weights."""
    weights = load_file(folder / "model.safetensors")
    save_file(weights | others, folder / "model.safetensors", {"format": "pt"})
    return weights


TWICE = "layers.0.mlp.up_proj.weight"
CONTRADICTIONS = {
    "one weight twice": ("llama", {TWICE: torch.ones(64, 48)}, f"twice, as {TWICE} and as model.{TWICE}"),
    "with two prefixes": ("llama", {f"model.model.{TWICE}": torch.ones(64, 48)}, "has one weight twice"),
    "integers": ("llama", {f"model.{TWICE}": torch.ones(64, 48, dtype=torch.int8)}, "is of type I8"),
    "complex": ("llama", {f"model.{TWICE}": torch.ones(64, 48, dtype=torch.complex64)}, "is of type C64"),
    "a bias of two parts": ("bert", {"cls.predictions.decoder.bias": torch.ones(90)}, "which are one in the model"),
    "a mask that is a bias": ("gpt2", {"transformer.h.0.attn.bias": torch.ones(144)}, "h.0.attn.bias"),
    "beside a mask": ("gpt2", {"transformer.h.0.attn.bias_scale": torch.ones(1)}, "h.0.attn.bias_scale"),
}


@pytest.mark.parametrize(("name", "others", "said"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_weights_that_contradict_each_other_or_are_no_floats_are_refused(changed, name, others, said):
    folder = changed(name, {})
    stored(folder, **others)
    with pytest.raises(InputError) as refused:
        read_source(folder, "softmax")
    assert said in str(refused.value)


def test_embeddings_that_are_tied_and_differ_are_refused(changed):
    folder = changed("llama", {"tie_word_embeddings": True})
    with pytest.raises(InputError, match="tie_word_embeddings"):
        read_source(folder, "softmax")


def test_files_of_weights_that_transformers_does_not_read_are_refused(changed):
    folder = changed("llama", {})
    shutil.copy(folder / "model.safetensors", folder / "delta.safetensors")
    with pytest.raises(InputError, match=r"has delta\.safetensors beside the weights"):
        read_source(folder, "softmax")
    # Mistral's own file, beside the file for transformers
    (folder / "delta.safetensors").rename(folder / "consolidated.safetensors")
    read_source(folder, "softmax")
    (folder / "consolidated.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(load_file(folder / "model.safetensors"), "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match="has its weights twice"):
        read_source(folder, "softmax")


def test_layers_that_a_class_leaves_out_by_itself_are_named(folders, tmp_path):
    folder = save(tiny("glm4_moe"), tmp_path / "saved")
    stored(folder, **{"model.layers.46.mystery.weight": torch.ones(3)})
    source = read_source(folder, "softmax")
    assert ("weights of other parts", ("model.layers.46.mystery.weight",)) in [
        (unused.place, unused.unknown) for unused in source.unused
    ]


def test_an_adapter_beside_the_weights_is_refused(changed):
    folder = changed("llama", {})
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4}))
    with pytest.raises(InputError, match="has an adapter"):
        read_source(folder, "softmax")


def test_weights_of_eight_bits_without_their_scales_are_refused(changed):
    folder = changed("llama", {})
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(weights | {name: weights[name].to(torch.float8_e4m3fn)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=f"{name} is of type F8_E4M3"):
        read_source(folder, "softmax")


@pytest.fixture
def with_tokenizer(changed):
    """Return a function that makes a folder with a byte-level tokenizer and entries of its tokenizer_config.json.

    The tokenizer adds no special tokens.
    """

    def make(entries):
        folder = changed("llama", {})
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:80]
        vocabulary = {token: index for index, token in enumerate(["<s>", "</s>", "<pad>", *letters])}
        made = Tokenizer(models.BPE(vocabulary, [], unk_token="<pad>"))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        fast = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
        fast.save_pretrained(folder)
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | entries))
        return folder

    return make


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"split_special_tokens": True}, "split_special_tokens"),
        ({"do_lower_case": True}, "do_lower_case"),
        ({"add_bos_token": True}, "add_bos_token"),
        ({"rope_prefix_bias": 3}, "rope_prefix_bias"),
        ({"prepend_bos_token": True}, "prepend_bos_token"),
    ],
)
def test_a_tokenizer_that_does_not_do_what_its_settings_say_is_refused(with_tokenizer, entries, said):
    folder = with_tokenizer(entries)
    with pytest.raises(InputError, match=said):
        read_source(folder, "softmax")
    read_source(folder, "softmax", ignore=[said])


def test_an_added_token_of_another_number_and_another_end_are_refused(with_tokenizer):
    folder = with_tokenizer({"added_tokens_decoder": {"5": {"content": "<s>"}}})
    with pytest.raises(InputError, match="added token '<s>' the number 5, and its tokenizer has 0"):
        read_source(folder, "softmax")


def test_two_ends_of_a_text_are_refused(with_tokenizer):
    folder = with_tokenizer({"eos_token": "</s>"})
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<pad>"}))
    with pytest.raises(InputError, match=r"with '</s>' by tokenizer_config\.json and with '<pad>'"):
        read_source(folder, "softmax")


def test_a_tokenizer_that_has_a_number_twice_is_refused(with_tokenizer):
    """The library reads such a file, and gives added tokens other numbers when it reads the export."""
    file = with_tokenizer({}) / "tokenizer.json"
    stored = json.loads(file.read_text())
    stored["model"]["vocab"]["zz"] = 5
    stored["added_tokens"].append(
        {**stored["added_tokens"][0], "content": "<new>", "id": len(stored["model"]["vocab"])}
    )
    file.write_text(json.dumps(stored))
    with pytest.raises(InputError, match=r"tokenizer\.json has a number twice"):
        read_source(file.parent, "softmax")


def test_an_added_token_whose_number_the_library_does_not_take_is_refused(with_tokenizer):
    file = with_tokenizer({}) / "tokenizer.json"
    stored = json.loads(file.read_text())
    stored["added_tokens"][0]["id"] = 40
    file.write_text(json.dumps(stored))
    with pytest.raises(InputError, match="added token '<s>' the number 40, and its tokenizer has 0"):
        read_source(file.parent, "softmax")


def test_a_tokenizer_with_random_merges_is_refused(with_tokenizer):
    file = with_tokenizer({}) / "tokenizer.json"
    stored = json.loads(file.read_text())
    stored["model"]["dropout"] = 0.1
    file.write_text(json.dumps(stored))
    with pytest.raises(InputError, match=r"leaves out merges at random \(dropout 0\.1\)"):
        read_source(file.parent, "softmax").checked_tokens()


def test_the_file_of_sentence_piece_alone_is_refused(with_tokenizer):
    """transformers reads the file and makes other tokens of it than SentencePiece."""
    folder = with_tokenizer({"tokenizer_class": "LlamaTokenizer"})
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    with pytest.raises(InputError, match=r"tokenizer\.model without tokenizer\.json"):
        read_source(folder, "softmax")


def test_a_chat_template_that_is_not_taken_is_said(with_tokenizer):
    folder = with_tokenizer({"chat_template": "{{ messages }}"})
    assert not read_source(folder, "softmax").warnings
    (folder / "chat_template.jinja").write_text("{{ messages }}\n")
    assert not read_source(folder, "softmax").warnings
    (folder / "chat_template.jinja").write_text("{{ messages[0] }}")
    (said,) = read_source(folder, "softmax").warnings
    assert "another chat template in tokenizer_config.json than in chat_template.jinja, which is taken" in said
    (folder / "additional_chat_templates").mkdir()
    (folder / "chat_template.jinja").rename(folder / "additional_chat_templates" / "tool_use.jinja")
    (said,) = read_source(folder, "softmax").warnings
    assert "in tokenizer_config.json than in additional_chat_templates, which is taken" in said


def test_settings_of_a_tokenizer_that_it_obeys_are_read_without_a_word(with_tokenizer):
    entries = {"add_bos_token": False, "add_prefix_space": False, "padding_side": "left", "legacy": True}
    entries |= {"is_local": True, "local_files_only": True}  # transformers stores how the tokenizer was loaded
    source = read_source(with_tokenizer(entries), "softmax")
    assert not any(unused.unknown for unused in source.unused)


DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)])
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
LLAMA_3 = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLIT), "isolated"), BYTES])
MERGED = [("1", "2"), ("12", "3"), ("123", "4"), ("h", "e"), ("l", "l"), ("'", "l"), ("'", "L"), ("Ġ", "Ġ"), ("Ċ", "Ċ")]


@pytest.mark.parametrize("named", ["GPT2Tokenizer", "Qwen2Tokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("split", [DIGITS, LLAMA_3], ids=["digits", "llama3"])
def test_a_tokenizer_is_that_of_its_file_whatever_class_its_settings_name(tmp_path, named, split):
    folder = save(tiny("llama", vocab_size=300), tmp_path / "saved")
    letters = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary = letters | {one + two: 256 + index for index, (one, two) in enumerate(MERGED)}
    stored = Tokenizer(models.BPE(vocabulary, MERGED))
    stored.pre_tokenizer, stored.decoder = split, decoders.ByteLevel()
    stored.add_special_tokens(["<|endoftext|>"])
    stored.enable_truncation(4)  # a limit left over from training
    stored.save(str(folder / "tokenizer.json"))
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": named} | special))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    source = read_source(folder, "softmax")
    source.write_tokenizer(tmp_path)
    exported = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    stored.no_truncation()
    for text in ("12345 he'll HE'LL\n\nhe  x", "  1234 def<|endoftext|>a", "zażółć 中文 🙂"):
        assert exported.encode(text).ids == stored.encode(text).ids
    assert (tmp_path / "chat_template.jinja").read_text() == "{{ messages }}"
    # The tokenizer's end of a text also ends a generation.
    assert source.model.config.eos_token_ids == (2, stored.token_to_id("<|endoftext|>"))
