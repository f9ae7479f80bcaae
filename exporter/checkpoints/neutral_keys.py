"""Keys of `config.json` that no code reads, and the values with which they describe what the model does anyway."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from sharp.core.errors import InputError
from sharp.exporter.checkpoints.architectures import ARCHITECTURES

# Switches for features that no model of transformers has, or that all have, with the value that says so.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "use_mrope": (False,),
    "use_mla": (False,),
    "use_sliding_window": (False,),  # `check_config` refuses False if the model has a window all the same
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "scale_attn_weights": (True,),
    "is_encoder_decoder": (False,),
}
SIGMOID_ROUTERS = ("dots1", "exaone_moe", "glm4_moe", "hy_v3", "laguna", "minimax_m2", "solar_open")
# (architecture, key) -> values with which the key describes what the architecture does anyway. Publishers use them.
NEUTRAL_OF: Mapping[tuple[str, str], tuple[Any, ...]] = {
    ("starcoder2", "norm_type"): ("layer_norm",),
    ("starcoder2", "mlp_type"): ("default",),
    ("starcoder2", "activation_function"): ("gelu",),  # the model reads hidden_act instead
    ("llama", "rope_interleaved"): (False,),
    ("gpt_bigcode", "multi_query"): (True,),
    ("cohere2", "order_of_interleaved_layers"): ("local_attn_first",),
    ("cohere2", "position_embedding_type"): ("rope_gptj",),
    ("cohere2", "rotary_pct"): (1.0,),
    ("cohere2", "use_embedding_sharing"): (True,),
    ("cohere2", "use_gated_activation"): (True,),
    ("cohere2", "use_parallel_block"): (True,),
    ("cohere2", "use_parallel_embedding"): (False, True),
    ("cohere2", "use_qk_norm"): (False,),
    ("modernbert", "position_embedding_type"): ("absolute",),  # a wrong value: ModernBERT always has RoPE
    **{(name, "scoring_func"): ("sigmoid",) for name in SIGMOID_ROUTERS},
}
POSITIONS = {"rope": ("rope", "rotary"), "learned": ("absolute", "learned")}
# Groups of names for one setting; an architecture reads one name of a group.
NAMES_OF_ONE_THING = (
    ("hidden_act", "hidden_activation", "activation_function"),
    ("rms_norm_eps", "layer_norm_eps", "norm_eps", "layer_norm_epsilon", "norm_epsilon", "layernorm_epsilon"),
    ("sliding_window", "sliding_window_size"),
    ("sliding_window_pattern", "_sliding_window_pattern", "layer_switch"),
    ("num_experts_per_tok", "experts_per_token", "num_experts_per_token"),
    ("max_position_embeddings", "original_max_position_embeddings"),
    ("num_attention_heads", "num_key_value_heads"),
    ("num_attention_heads", "n_head", "num_heads"),
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    ("hidden_size", "n_embd", "d_model", "dim"),
    ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "hidden_dim"),
)
MAY_DIFFER = ("num_key_value_heads", "original_max_position_embeddings")  # for other models they are separate settings
OF_EXPERTS = ("expert", "moe", "router", "topk")
PARTS = {"attention": ("attn", "attention"), "qkv": ("attn", "attention"), "mlp": ("mlp", "feed_forward", "ffn")}


def is_neutral(facts: PreTrainedConfig, model: nn.Module, content: Mapping[str, Any], name: str) -> bool:
    """Whether key `name` of `content`, which no code reads, describes what `model` does anyway.

    `content` is the content of `config.json`, `facts` is transformers' configuration of the model. A key that is not
    known, or whose value says something else, is not neutral.
    """
    value = content[name]
    if name in NEUTRAL and value in NEUTRAL[name]:
        return True
    if value in NEUTRAL_OF.get((facts.model_type, name), ()):
        return True
    if name.endswith("intermediate_size") and name in type(facts).__dataclass_fields__:
        return True  # the size of layers that the model does not have, either dense layers or experts
    known = name in type(facts).__dataclass_fields__
    of_experts = known and any(part in name for part in OF_EXPERTS)
    if of_experts and not any("expert" in parameter for parameter, _ in model.named_parameters()):
        return True  # all layers are dense
    decoder = ARCHITECTURES[facts.model_type].kind == "decoder"
    if name == "is_causal":
        return value is decoder
    if name == "activation" and value == "swiglu":  # SwiGLU is a gated layer whose activation is silu
        return getattr(facts, "hidden_act", None) == "silu"
    if name == "initial_context_length":
        rope: dict[str, Any] = getattr(facts, "rope_parameters", None) or {}
        return bool(rope.get("original_max_position_embeddings") == value)
    if name == "position_embedding_type":
        return value in POSITIONS[ARCHITECTURES[facts.model_type].positions]
    if "bias" in name and value is False:
        return not _has_bias(model, name)
    return any(getattr(facts, other, content.get(other)) == value for other in _other_names(facts, content, name))


def check_other_names(where: Path, facts: PreTrainedConfig, content: Mapping[str, Any], name: str) -> None:
    """Refuse the key `name`, which no code reads, if the model reads the same setting under another name.

    The caller has checked that the two values differ (`is_neutral`).

    Raises:
        InputError: the model reads the setting under another name.
    """
    for other in () if name in MAY_DIFFER else _other_names(facts, content, name):
        read = getattr(facts, other, content.get(other))
        raise InputError(
            f"{where} has {name} {content[name]!r} and {other} {read!r}, which are two names of one thing, "
            "and the model has the latter; leave one of them out"
        )


def _other_names(facts: PreTrainedConfig, content: Mapping[str, Any], name: str) -> list[str]:
    """Return other names of the setting `name` (as n_embd for hidden_size) that have a value in `content`, a config."""
    return [
        other
        for names in NAMES_OF_ONE_THING
        if name in names
        for other in names
        if other != name and getattr(facts, other, content.get(other)) is not None
    ]


def _has_bias(model: nn.Module, name: str) -> bool:
    """Whether the part of a model that a key such as `attention_bias` names has biases."""
    parts = next((parts for part, parts in PARTS.items() if part in name), ("",))
    weights = [parameter.lower() for parameter, _ in model.named_parameters()]
    return any(weight.endswith("bias") and any(part in weight for part in parts) for weight in weights)
