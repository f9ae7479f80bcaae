"""Random small models of every Hugging Face architecture that sharp-export takes."""

import dataclasses
from pathlib import Path

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel

from sharp.exporter.checkpoints.architectures import ARCHITECTURES

SIZES = {
    "vocab_size": 90,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = {"num_key_value_heads": 2}
MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FULL = {"full_attention_interval": 1}  # of families that have linear attention in the other layers
# Settings that make an architecture different from Llama, small enough to matter within a few tokens.
SPECIAL = {
    "mistral": {**GROUPED, "head_dim": 12, "sliding_window": 7},
    "qwen2": {**GROUPED, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "qwen3": {**GROUPED, "head_dim": 12},
    "gemma2": {
        **GROUPED,
        "head_dim": 12,
        "sliding_window": 7,
        "query_pre_attn_scalar": 10,
        "attn_logit_softcapping": 1.5,
    },
    "gemma3_text": {**GROUPED, "head_dim": 12, "sliding_window": 7, "query_pre_attn_scalar": 10},
    "gpt2": {"scale_attn_by_inverse_layer_idx": True},
    "gpt_neox": {},
    "phi3": {**GROUPED, "sliding_window": 7},
    "smollm3": {**GROUPED, "no_rope_layer_interval": 2},
    "gemma": {**GROUPED, "head_dim": 12},
    "granite": {
        **GROUPED,
        "attention_multiplier": 0.3,
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 3.0,
    },
    "starcoder2": {**GROUPED, "sliding_window": 7},
    "cohere": {**GROUPED, "use_qk_norm": True, "logit_scale": 0.3},
    "cohere2": {**GROUPED, "sliding_window": 7},
    "glm": {**GROUPED, "head_dim": 8},
    "glm4": {**GROUPED, "head_dim": 8},
    "olmo": {**GROUPED, "clip_qkv": 0.5},
    "olmo3": {**GROUPED, "sliding_window": 7},
    "phi": {**GROUPED, "qk_layernorm": True},
    "opt": {"word_embed_proj_dim": 48, "ffn_dim": 64},
    "gpt_bigcode": {"n_inner": 64},
    "exaone4": {**GROUPED, "sliding_window": 7},
    "seed_oss": {**GROUPED, "head_dim": 12},
    "hunyuan_v1_dense": {**GROUPED, "head_dim": 12},
    "ministral": {**GROUPED, "head_dim": 12, "sliding_window": 7},
    "qwen3_moe": {
        **GROUPED,
        "head_dim": 12,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "mixtral": {**GROUPED, "sliding_window": 7, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2},
    "arcee": {**GROUPED, "head_dim": 8},
    "biogpt": {},
    "cwm": {**GROUPED, "head_dim": 12, "sliding_window": 7},
    "gpt-sw3": {"n_inner": 64},
    "helium": {**GROUPED, "head_dim": 8},
    "hyperclovax": {**GROUPED, "head_dim": 12, "attention_multiplier": 0.3},
    "internlm3": {**GROUPED, "head_dim": 12},
    "ministral3": {**GROUPED, "head_dim": 12, "sliding_window": 7},
    "vaultgemma": {
        **GROUPED,
        "head_dim": 12,
        "sliding_window": 7,
        "query_pre_attn_scalar": 10,
        "attn_logit_softcapping": 1.5,
    },
    "aria_text": {**GROUPED, **MOE, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "cohere2_moe": {**GROUPED, **MOE, "sliding_window": 7},
    "dots1": {
        **GROUPED,
        **MOE,
        "sliding_window": None,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 0,
    },
    "ernie4_5_moe": {**GROUPED, **MOE, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1},
    "exaone_moe": {**GROUPED, **MOE, "sliding_window": 7, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1},
    "flex_olmo": {**GROUPED, **MOE},
    "glm4_moe": {**GROUPED, **MOE, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 0},
    "granitemoe": {**GROUPED, **MOE, "attention_multiplier": 0.3, "logits_scaling": 3.0},
    "granitemoeshared": {**GROUPED, **MOE, "attention_multiplier": 0.3, "shared_intermediate_size": 32},
    "hunyuan_v1_moe": {**GROUPED, **MOE, "head_dim": 12},
    "hy_v3": {**GROUPED, **MOE, "head_dim": 12},
    "laguna": {**GROUPED, **MOE, "head_dim": 12, "sliding_window": 7},
    "mellum": {**GROUPED, **MOE, "head_dim": 12, "sliding_window": 7},
    "minimax_m2": {**GROUPED, **MOE, "head_dim": 12},
    "qwen2_moe": {**GROUPED, **MOE, "shared_expert_intermediate_size": 32},
    "solar_open": {**GROUPED, **MOE, "head_dim": 12, "n_routed_experts": 4, "n_shared_experts": 1},
    "gpt_oss": {**GROUPED, **MOE, "head_dim": 12, "sliding_window": 7},
    "flint": {
        **GROUPED,
        **MOE,
        "head_dim": 12,
        "sliding_window": 7,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [0],
    },
    "afmoe": {**GROUPED, **MOE, "head_dim": 12, "sliding_window": 7, "num_dense_layers": 1, "num_shared_experts": 1},
    "beam": {
        **GROUPED,
        **MOE,
        "head_dim": 12,
        "sliding_window": 7,
        "num_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "diffllama": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 12},
    "lfm3": {**GROUPED, "head_dim": 12, "sliding_window": 7},
    "qwen3_5_text": {**GROUPED, **FULL, "head_dim": 32},
    "qwen3_5_moe_text": {**GROUPED, **FULL, **MOE, "head_dim": 32, "shared_expert_intermediate_size": 32},
    "qwen3_next": {**GROUPED, **FULL, **MOE, "head_dim": 16, "shared_expert_intermediate_size": 32},
    "granite_swa": {**GROUPED, "sliding_window": 7, "attention_multiplier": 0.3, "logits_scaling": 3.0},
    "granitemoe_swa": {**GROUPED, **MOE, "sliding_window": 7, "attention_multiplier": 0.3, "logits_scaling": 3.0},
    "bert": {},
    "roberta": {"pad_token_id": 1, "type_vocab_size": 1},
    "modernbert": {
        "num_hidden_layers": 3,
        "global_attn_every_n_layers": 2,
        "local_attention": 6,
        "reference_compile": False,
        "cls_token_id": 1,
        "sep_token_id": 2,
    },
    "xlm-roberta": {"pad_token_id": 1, "type_vocab_size": 1},
}
# Architectures whose layer types alternate; the tiny models alternate every two layers instead of four or six.
ALTERNATING = (
    "afmoe",
    "beam",
    "gemma3_text",
    "cohere2",
    "olmo3",
    "exaone4",
    "ministral",
    "cohere2_moe",
    "cwm",
    "exaone_moe",
    "flint",
    "gpt_oss",
    "granite_swa",
    "granitemoe_swa",
    "laguna",
    "lfm3",
    "mellum",
    "vaultgemma",
)
VARYING = (*ALTERNATING, "gemma2", "gpt2", "qwen2", "smollm3")  # architectures whose layers are not all alike


def tiny(model_type: str, **changes: object) -> PreTrainedModel:
    """Return a model whose parameters are so large that attention and its variants change the output."""
    torch.manual_seed(0)
    special = SPECIAL.get(model_type, GROUPED)
    layers = {"layer_types": ["sliding_attention", "full_attention"]} if model_type in ALTERNATING else {}
    made = CONFIG_MAPPING[model_type]
    declared = {field.name for field in dataclasses.fields(made)} | made.attribute_map.keys()
    given = {**SIZES, **special, **layers, **changes}
    general = (SIZES.keys() | GROUPED.keys() | MOE.keys()) - declared  # an export would refuse keys without effect
    config = made(**{name: value for name, value in given.items() if name not in general})
    auto = AutoModelForCausalLM if ARCHITECTURES[model_type].kind == "decoder" else AutoModelForMaskedLM
    model = auto.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def save(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder
