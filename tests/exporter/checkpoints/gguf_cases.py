"""Tiny GGUF files of every architecture that Sharp reads, and of every kind of RoPE scaling."""

import numpy as np

from tests.exporter.checkpoints.gguf_writer import Case, llama3_factors

LENGTH = 100  # tokens per sequence, more than windows and YaRN's original length
ROPE = {"rope_theta": 10000.0}
HEADS = {"attention.key_length": 12, "attention.value_length": 12}
EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ROPE}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, **ROPE}
YARN_KEYS = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
FACTORS = np.array([1.0, 1.5, 2.0, 7.0], np.float32)
LONGROPE = {"rope_factors_short.weight": FACTORS[:2], "rope_factors_long.weight": 3 * FACTORS[:2]}
WINDOW = {"attention.sliding_window": 7}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
PHI3_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": FACTORS[:2].tolist(),
    "long_factor": (3 * FACTORS[:2]).tolist(),
    "attention_factor": 1.25,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.5,
    **ROPE,
}


def _llama(keys: dict[str, object], rope: dict[str, object], **tensors: np.ndarray) -> Case:
    return Case(
        "llama", "llama", {"rope_parameters": rope}, keys, {f"{name}.weight": one for name, one in tensors.items()}
    )


ROPE_CASES = {
    "linear": _llama(
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0, **ROPE}
    ),
    "scale_linear": _llama({"rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0, **ROPE}),
    "none": _llama({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {"rope_type": "default", **ROPE}),
    "yarn": _llama(YARN_KEYS, YARN),
    "yarn-attn_factor": _llama(
        {**YARN_KEYS, "rope.scaling.attn_factor": 0.5}, {**YARN, "attention_factor": 0.5 * (1 + 0.1 * float(np.log(4)))}
    ),
    "llama3": _llama(
        {"rope.scaling.original_context_length": 64},
        {**LLAMA3, "original_max_position_embeddings": 64},
        rope_freqs=llama3_factors(10000.0, 4, 8.0, 64),
    ),
    "llama3-length-not-in-file": _llama(
        {}, {**LLAMA3, "original_max_position_embeddings": 50}, rope_freqs=llama3_factors(10000.0, 4, 8.0, 50)
    ),
    "freq_base": _llama({"rope.freq_base": 500.0}, {"rope_type": "default", "rope_theta": 500.0}),
    "gemma3-linear": Case(
        "gemma3",
        "gemma3_text",
        {
            "rope_parameters": GEMMA3_ROPE,
            "query_pre_attn_scalar": 12,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        {
            **HEADS,
            **WINDOW,
            "attention.sliding_window_pattern": 2,
            "rope.freq_base": 1e6,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
    ),
    "qwen2-yarn": Case("qwen2", "qwen2", {"rope_parameters": YARN, "use_sliding_window": False}, YARN_KEYS),
    "phi3-longrope": Case(
        "phi3",
        "phi3",
        {"rope_parameters": PHI3_LONGROPE, "sliding_window": None, "original_max_position_embeddings": 4096},
        {
            "rope.dimension_count": 4,
            "rope.scaling.type": "longrope",
            "rope.scaling.attn_factor": 1.25,
            "rope.scaling.original_context_length": 4096,
        },
        LONGROPE,
    ),
}
CASES = {
    "llama": Case("llama", "llama"),
    "llama-head_dim": Case("llama", "llama", {"head_dim": 12}, {**HEADS, "rope.dimension_count": 12}),
    "llama-biases": Case("llama", "llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": Case("llama", "llama", {"tie_word_embeddings": True}),
    "mixtral": Case(
        "llama", "mixtral", {"sliding_window": None}, {"expert_count": 4, "expert_used_count": 2, "rope.freq_base": 1e6}
    ),
    "qwen2": Case("qwen2", "qwen2", {"use_sliding_window": False}, {"rope.freq_base": 10000.0}),
    "qwen2moe": Case("qwen2moe", "qwen2_moe", {}, {**EXPERTS, "expert_shared_feed_forward_length": 32}),
    "qwen3": Case("qwen3", "qwen3", {}, HEADS),
    "qwen3moe": Case("qwen3moe", "qwen3_moe", {}, {**HEADS, **EXPERTS}),
    "gemma": Case("gemma", "gemma", {}, HEADS),
    "gemma2": Case(
        "gemma2",
        "gemma2",
        {"query_pre_attn_scalar": 12, "final_logit_softcapping": 3.0},
        {**HEADS, **WINDOW, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 3.0},
    ),
    "gemma3": Case(
        "gemma3",
        "gemma3_text",
        {
            "query_pre_attn_scalar": 12,
            "layer_types": ["sliding_attention", "full_attention"],
            "final_logit_softcapping": 3.0,
        },
        {
            **HEADS,
            **WINDOW,
            "attention.sliding_window_pattern": [True, False],
            "rope.freq_base": 1e6,
            "final_logit_softcapping": 3.0,
        },
    ),
    "phi3": Case(
        "phi3",
        "phi3",
        {"sliding_window": None, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, **ROPE}},
        {"rope.dimension_count": 4},
    ),
    "gpt2": Case("gpt2", "gpt2", {"scale_attn_by_inverse_layer_idx": False, "n_inner": 64}),
    "starcoder2": Case("starcoder2", "starcoder2", {"sliding_window": None}, {"rope.freq_base": 10000.0}),
    "gpt-oss": Case(
        "gpt-oss",
        "gpt_oss",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}, "intermediate_size": 32},
        {**HEADS, **WINDOW, **EXPERTS, "rope.freq_base": 150000.0, "rope.dimension_count": 12},
    ),
    "minimax-m2": Case(
        "minimax-m2",
        "minimax_m2",
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, **ROPE}},
        {**HEADS, **EXPERTS, "expert_feed_forward_length": 64, "expert_gating_func": 2, "rope.dimension_count": 6},
    ),
    "granite": Case(
        "granite",
        "granite",
        {},
        {"attention.scale": 0.3, "embedding_scale": 2.0, "residual_scale": 0.5, "logit_scale": 3.0},
    ),
    "smollm3": Case(
        "smollm3", "smollm3", {"num_hidden_layers": 4, "no_rope_layer_interval": 4}, {"rope.freq_base": 2e6}
    ),
}
ALL_CASES = {**CASES, **{f"rope-{name}": case for name, case in ROPE_CASES.items()}}
