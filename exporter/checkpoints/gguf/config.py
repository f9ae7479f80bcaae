"""The configuration that transformers needs for a GGUF file, from llama.cpp's keys of the file's architecture."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sharp.core.errors import InputError
from sharp.exporter.checkpoints.gguf.file import GgufFile
from sharp.exporter.checkpoints.gguf.rope import OWN_TYPE, rope_parameters

Settings = dict[str, Any]


@dataclass(frozen=True)
class GgufArchitecture:
    """One `general.architecture`: the model type of transformers that computes it, and the reader of its settings.

    `settings` gets a file and returns arguments of the configuration's class, which may have another `model_type`.

    llama.cpp stores some weights in another form. With `paired`, the two rows of queries or keys that RoPE rotates
    together are neighbours. With `norm_offset`, the weights of every RMSNorm are 1 more than in transformers.
    """

    name: str
    model_type: str
    settings: Callable[[GgufFile], Settings]
    paired: bool = False
    norm_offset: bool = False


def read_settings(file: GgufFile) -> tuple[GgufArchitecture, Settings]:
    """Return the architecture of a file and the settings of its configuration in transformers, with `model_type`.

    Raises:
        InputError: the architecture is not supported, or a key is missing or says what Sharp cannot compute.
    """
    architecture = GGUF_ARCHITECTURES.get(file.architecture)
    if architecture is None:
        raise InputError(
            f"{file.path} is a {file.architecture} model, which Sharp does not read from GGUF yet; it reads "
            f"{', '.join(GGUF_ARCHITECTURES)} (for others export the Hugging Face folder)"
        )
    if file.value(file.own_key("attention.causal"), True) is not True:
        raise InputError(
            f"{file.path}: {file.own_key('attention.causal')} is false, and Sharp reads decoders only from GGUF; "
            "export the model's Hugging Face folder"
        )
    settings = {**_sizes(file), **architecture.settings(file)}
    return architecture, {"model_type": architecture.model_type, **settings}


def _sizes(file: GgufFile) -> Settings:
    """Return the settings that every architecture has: sizes, and whether input and output embeddings are tied.

    Raises:
        InputError: the file has no embeddings, or fewer than tokens.
    """
    if not file.has_tensor("token_embd.weight"):
        raise InputError(f"{file.path} is incomplete: it has no token_embd.weight; copy the file again")
    rows = file.shape("token_embd.weight")[0]
    file.integer("vocab_size", rows)  # llama.cpp takes the length of the vocabulary, too
    if len(file.tokens) > rows:
        raise InputError(
            f"{file.path} has {len(file.tokens)} tokens, but embeddings of {rows} only; convert the model again"
        )
    heads = file.integer("attention.head_count")
    return {
        "vocab_size": rows,
        "max_position_embeddings": file.integer("context_length"),
        "num_hidden_layers": file.integer("block_count"),
        "hidden_size": file.integer("embedding_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.integer("attention.head_count_kv", heads),
        "intermediate_size": file.integer("feed_forward_length", 0),
        "tie_word_embeddings": not file.has_tensor("output.weight"),
    }


def _head_dim(file: GgufFile) -> int:
    """Return the width of a head, which keys and values must share.

    Raises:
        InputError: keys and values differ in width.
    """
    width = file.integer(
        "attention.key_length", file.integer("embedding_length") // file.integer("attention.head_count")
    )
    if (value_width := file.integer("attention.value_length", width)) != width:
        raise file.bad(file.own_key("attention.value_length"), f"{width}, as for keys", value_width)
    return width


def _rotated(file: GgufFile) -> int:
    """Return the number of dimensions of a head that are rotated."""
    return file.integer("rope.dimension_count", _head_dim(file))


def _rotary(file: GgufFile, **options: bool) -> Settings:
    """Return head_dim and RoPE of an architecture that rotates whole heads; `options` are for `rope_parameters`.

    Raises:
        InputError: the file rotates a part of each head only.
    """
    width = _head_dim(file)
    if (rotated := _rotated(file)) != width:
        raise file.bad(file.own_key("rope.dimension_count"), f"{width}, the whole head", rotated)
    return {"head_dim": width, "rope_parameters": rope_parameters(file, width, **options)}


def _partial_rotary(file: GgufFile, **options: bool) -> Settings:
    """Return head_dim and RoPE of an architecture that may rotate the first part of a head only."""
    width, rotated = _head_dim(file), _rotated(file)
    parameters = rope_parameters(file, rotated, **options)
    return {"head_dim": width, "rope_parameters": {**parameters, "partial_rotary_factor": rotated / width}}


def _rms(file: GgufFile) -> Settings:
    """Return the setting of RMSNorm's epsilon."""
    return {"rms_norm_eps": file.number("attention.layer_norm_rms_epsilon")}


def _layer_types(file: GgufFile, period: int) -> list[str]:
    """Return the attention type of every layer. Every `period`-th is full, unless the file has another pattern."""
    layers = file.integer("block_count")
    key = file.own_key("attention.sliding_window_pattern")
    pattern = file.value(key, period)
    if isinstance(pattern, list):
        if len(pattern) != layers:
            raise file.bad(key, f"{layers} values, one for each layer", pattern)
        windows = [bool(sees_window) for sees_window in pattern]
    elif isinstance(pattern, int) and not isinstance(pattern, bool) and pattern >= 0:
        windows = [pattern == 0 or layer % pattern < pattern - 1 for layer in range(layers)]
    else:
        raise file.bad(key, "a period or a list", pattern)
    return ["sliding_attention" if window else "full_attention" for window in windows]


def _same_base(file: GgufFile) -> None:
    """Refuse a file with another base of RoPE in layers with a window, for classes with one base for all layers."""
    base = file.number("rope.freq_base", 10000.0)
    if (other := file.number("rope.freq_base_swa", base)) != base:
        raise file.bad(file.own_key("rope.freq_base_swa"), f"{base:g}, as for other layers", other)


def _biases(file: GgufFile) -> Settings:
    """Return the settings that say whether a Llama has biases. llama.cpp adds the biases that are in the file."""
    names = {name.split(".", 2)[-1] for name in file.tensors if name.startswith("blk.")}
    attention = {f"attn_{part}.bias" for part in ("q", "k", "v", "output")}
    return {
        "attention_bias": not attention.isdisjoint(names),
        "mlp_bias": not {f"ffn_{part}.bias" for part in ("gate", "up", "down")}.isdisjoint(names),
    }


def _llama(file: GgufFile) -> Settings:
    """Return the settings of a Llama, or of a Mistral (with a window) or Mixtral (with experts) converted as Llama."""
    settings = {**_rotary(file, with_factors=True), **_rms(file)}
    window, experts = file.integer("attention.sliding_window", 0), file.integer("expert_count", 0)
    used_experts = file.integer("expert_used_count", 0)
    if experts:
        chosen = {"num_local_experts": experts, "num_experts_per_tok": used_experts}
        return {**settings, **chosen, "model_type": "mixtral", "sliding_window": window or None}
    if window:
        return {**settings, "model_type": "mistral", "sliding_window": window}
    return {**settings, **_biases(file)}


def _qwen(file: GgufFile) -> Settings:
    """Return the settings of Qwen 2 and 3: RoPE, RMSNorm, no window."""
    return {**_rotary(file), **_rms(file), "use_sliding_window": False}


def _experts(file: GgufFile) -> Settings:
    """Return the settings of a mixture of experts: their number, how many a token uses, and their width."""
    used = file.integer("expert_used_count")
    wide = file.integer("expert_feed_forward_length", 0) or file.integer("feed_forward_length") // used
    return {"num_experts": file.integer("expert_count"), "num_experts_per_tok": used, "moe_intermediate_size": wide}


def _qwen2_moe(file: GgufFile) -> Settings:
    """Return the settings of Qwen 2 MoE, which also has a shared expert."""
    shared = file.integer("expert_shared_feed_forward_length", 0) or file.integer("feed_forward_length")
    return {**_qwen(file), **_experts(file), "shared_expert_intermediate_size": shared, "norm_topk_prob": False}


def _qwen3_moe(file: GgufFile) -> Settings:
    """Return the settings of Qwen 3 MoE."""
    return {**_qwen(file), **_experts(file), "norm_topk_prob": True}


def _gemma_scale(file: GgufFile, layers_of_27b: int) -> Settings:
    """Return the number whose root divides Gemma's queries. Like llama.cpp, recognize a 27B model by its depth."""
    whole = file.integer("block_count") == layers_of_27b
    heads = file.integer("attention.head_count")
    return {"query_pre_attn_scalar": file.integer("embedding_length") // heads if whole else _head_dim(file)}


def _gemma2(file: GgufFile) -> Settings:
    """Return the settings of Gemma 2: windows in alternate layers, and soft caps."""
    _same_base(file)
    return {
        **_rotary(file),
        **_rms(file),
        **_gemma_scale(file, 46),
        "sliding_window": file.integer("attention.sliding_window", 4096),
        "layer_types": _layer_types(file, 2),
        "attn_logit_softcapping": file.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.number("final_logit_softcapping", 30.0),
    }


def _gemma3(file: GgufFile) -> Settings:
    """Return the settings of Gemma 3: five layers with a window, RoPE of their own, to one without."""
    settings = {**_rotary(file), **_rms(file), **_gemma_scale(file, 62)}
    window = file.integer("attention.sliding_window", 0)
    layers = file.integer("block_count")
    # llama.cpp does not scale the angles of layers with a window.
    local = {"rope_type": "default", "rope_theta": file.number("rope.freq_base_swa", 10000.0)}
    return {
        **settings,
        "rope_parameters": {"full_attention": settings["rope_parameters"], "sliding_attention": local},
        "sliding_window": window or 4096,
        "layer_types": _layer_types(file, 6) if window else ["full_attention"] * layers,
        "final_logit_softcapping": file.number("final_logit_softcapping", 0.0) or None,
    }


def _phi3(file: GgufFile) -> Settings:
    """Return the settings of a Phi-3, with factors of angles as `longrope`, the only form that transformers takes."""
    settings = _partial_rotary(file, with_factors=True)
    parameters = settings["rope_parameters"]
    length = file.integer("context_length")
    original = file.integer("rope.scaling.original_context_length", length)
    if parameters["rope_type"] != "default":
        factors = parameters.pop("factors", [parameters.get("factor", 1.0)] * (_rotated(file) // 2))
        if parameters["rope_type"] not in (OWN_TYPE, "linear"):
            raise file.bad(file.own_key("rope.scaling.type"), "linear or longrope for Phi-3", parameters["rope_type"])
        settings["rope_parameters"] = {
            "rope_type": "longrope",
            "rope_theta": parameters["rope_theta"],
            "partial_rotary_factor": parameters["partial_rotary_factor"],
            "attention_factor": parameters.get("attention_factor", 1.0),
            "short_factor": factors,
            "long_factor": factors,
            "original_max_position_embeddings": original,
        }
    return {
        **settings,
        **_rms(file),
        "original_max_position_embeddings": original,
        "sliding_window": file.integer("attention.sliding_window", 0) or None,
    }


def _gpt2(file: GgufFile) -> Settings:
    """Return the settings of GPT-2: LayerNorm's epsilon and the width of the feed-forward layer."""
    return {
        "layer_norm_epsilon": file.number("attention.layer_norm_epsilon"),
        "n_inner": file.integer("feed_forward_length"),
    }


def _starcoder2(file: GgufFile) -> Settings:
    """Return the settings of StarCoder 2; without a window in the file there is none."""
    return {
        **_rotary(file),
        "norm_epsilon": file.number("attention.layer_norm_epsilon"),
        "sliding_window": file.integer("attention.sliding_window", 0) or None,
    }


def _gpt_oss(file: GgufFile) -> Settings:
    """Return the settings of a gpt-oss. Its YaRN is not truncated, which no key says; llama.cpp truncates it."""
    _same_base(file)
    return {
        **_rotary(file, truncate=False),
        **_rms(file),
        "intermediate_size": file.integer("expert_feed_forward_length"),
        "num_local_experts": file.integer("expert_count"),
        "num_experts_per_tok": file.integer("expert_used_count"),
        "sliding_window": file.integer("attention.sliding_window"),
        "layer_types": _layer_types(file, 2),
    }


def _minimax_m2(file: GgufFile) -> Settings:
    """Return the settings of MiniMax M2. InputError if its experts are not chosen by sigmoid."""
    if (gating := file.integer("expert_gating_func", 2)) != 2:
        raise file.bad(file.own_key("expert_gating_func"), "2 (sigmoid)", gating)
    return {
        **_partial_rotary(file),
        **_rms(file),
        "intermediate_size": file.integer("expert_feed_forward_length", file.integer("feed_forward_length", 0)),
        "num_local_experts": file.integer("expert_count"),
        "num_experts_per_tok": file.integer("expert_used_count"),
    }


def _granite(file: GgufFile) -> Settings:
    """Return the settings of Granite with its scales. InputError for a model without positions."""
    if file.value(file.own_key("rope.scaling.finetuned"), True) is not True:
        raise file.bad(file.own_key("rope.scaling.finetuned"), "true only (false: no positions)", False)
    settings = {**_rotary(file, with_factors=True), **_rms(file), **_biases(file)}
    scale = file.number("attention.scale", 0.0) or settings["head_dim"] ** -0.5
    return {
        **settings,
        "logits_scaling": file.number("logit_scale"),
        "residual_multiplier": file.number("residual_scale", 0.0) or 1.0,
        "embedding_multiplier": file.number("embedding_scale", 0.0) or 1.0,
        "attention_multiplier": scale,
    }


def _smollm3(file: GgufFile) -> Settings:
    """Return the settings of SmolLM3, in which every fourth layer has no RoPE."""
    layers = file.integer("block_count")
    return {**_rotary(file), **_rms(file), "no_rope_layers": [int((layer + 1) % 4 != 0) for layer in range(layers)]}


def _gemma(file: GgufFile) -> Settings:
    """Return the settings of Gemma: RoPE and RMSNorm."""
    return {**_rotary(file), **_rms(file)}


GGUF_ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        GgufArchitecture("llama", "llama", _llama, paired=True),
        GgufArchitecture("qwen2", "qwen2", _qwen),
        GgufArchitecture("qwen2moe", "qwen2_moe", _qwen2_moe),
        GgufArchitecture("qwen3", "qwen3", _qwen),
        GgufArchitecture("qwen3moe", "qwen3_moe", _qwen3_moe),
        GgufArchitecture("gemma", "gemma", _gemma, norm_offset=True),
        GgufArchitecture("gemma2", "gemma2", _gemma2, norm_offset=True),
        GgufArchitecture("gemma3", "gemma3_text", _gemma3, norm_offset=True),
        GgufArchitecture("phi3", "phi3", _phi3),
        GgufArchitecture("gpt2", "gpt2", _gpt2),
        GgufArchitecture("starcoder2", "starcoder2", _starcoder2),
        GgufArchitecture("gpt-oss", "gpt_oss", _gpt_oss),
        GgufArchitecture("minimax-m2", "minimax_m2", _minimax_m2),
        GgufArchitecture("granite", "granite", _granite, paired=True),
        GgufArchitecture("smollm3", "smollm3", _smollm3, paired=True),
    )
}
