"""The Hugging Face architectures that sharp-export takes. The hook gives their attention to the attention op."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Architecture:
    """One `model_type` of `config.json`. `notes` names features of its attention other than grouped queries and RoPE.

    `models` are the names of its models, for people.
    With `positions_after_padding` the position of the first token is pad_token_id + 1, so the longest sequence has
    pad_token_id + 1 tokens fewer than the model has positions.
    """

    model_type: str
    models: str
    kind: Literal["decoder", "encoder"] = "decoder"
    positions: Literal["rope", "learned"] = "rope"
    notes: str = ""
    positions_after_padding: bool = False


ARCHITECTURES = {
    architecture.model_type: architecture
    for architecture in (
        Architecture("llama", "Llama, SmolLM, SmolLM2, TinyLlama"),
        Architecture("mistral", "Mistral", notes="sliding window"),
        Architecture("qwen2", "Qwen2, Qwen2.5", notes="sliding window in some layers"),
        Architecture("qwen3", "Qwen3", notes="normalized queries and keys"),
        Architecture("gemma2", "Gemma 2", notes="soft cap, sliding window in every other layer"),
        Architecture(
            "gemma3_text", "Gemma 3 (text)", notes="normalized queries and keys, sliding window in most layers"
        ),
        Architecture("gpt2", "GPT-2", positions="learned"),
        Architecture("gpt_neox", "GPT-NeoX, Pythia", notes="part of each head is rotated"),
        Architecture("phi3", "Phi-3, Phi-4", notes="sliding window"),
        Architecture("olmo2", "OLMo 2", notes="normalized queries and keys"),
        Architecture("smollm3", "SmolLM3", notes="layers without positions"),
        Architecture("gemma", "Gemma"),
        Architecture("granite", "Granite 3", notes="logits and scale by factors of their own"),
        Architecture("starcoder2", "StarCoder 2", notes="sliding window"),
        Architecture(
            "cohere", "Command R, Aya Expanse", notes="normalized queries and keys, pairs of neighbours are rotated"
        ),
        Architecture(
            "cohere2", "Command R7B, Command A", notes="sliding window in most layers, no positions in the others"
        ),
        Architecture("glm", "GLM-4 (9B, 2024)", notes="part of each head is rotated, in pairs of neighbours"),
        Architecture("glm4", "GLM-4 (2025), GLM-Z1", notes="as glm"),
        Architecture("olmo", "OLMo", notes="clipped queries, keys and values"),
        Architecture("olmo3", "OLMo 3", notes="normalized queries and keys, sliding window in most layers"),
        Architecture("phi", "Phi-1, Phi-2", notes="part of each head is rotated"),
        Architecture("opt", "OPT", positions="learned"),
        Architecture("gpt_bigcode", "StarCoder, SantaCoder", positions="learned", notes="one KV head"),
        Architecture("exaone4", "EXAONE 4", notes="sliding window in most layers, no positions in the others"),
        Architecture("ernie4_5", "ERNIE 4.5", notes="pairs of neighbours are rotated"),
        Architecture("seed_oss", "Seed-OSS"),
        Architecture("apertus", "Apertus", notes="normalized queries and keys"),
        Architecture("hunyuan_v1_dense", "Hunyuan (dense)", notes="normalized queries and keys"),
        Architecture("ministral", "Ministral", notes="sliding window in most layers"),
        Architecture("qwen3_moe", "Qwen3 (Mixture of Experts)", notes="normalized queries and keys; experts"),
        Architecture("mixtral", "Mixtral", notes="sliding window; experts"),
        Architecture("olmoe", "OLMoE", notes="normalized queries and keys; experts"),
        Architecture("arcee", "Arcee AFM"),
        Architecture("biogpt", "BioGPT", positions="learned"),
        Architecture("cwm", "Code World Model", notes="sliding window in most layers"),
        Architecture("gpt-sw3", "GPT-SW3", positions="learned"),
        Architecture("helium", "Helium", notes="pairs of neighbours are rotated"),
        Architecture("hyperclovax", "HyperCLOVA X SEED Think", notes="logits and scale by factors of their own"),
        Architecture("internlm3", "InternLM 3"),
        Architecture("iquestcoder", "IQuest-Coder"),
        Architecture("jais2", "Jais 2"),
        Architecture(
            "ministral3", "Ministral 3", notes="queries grow with the position, beyond the length of pre-training"
        ),
        Architecture("nanochat", "nanochat", notes="normalized queries and keys"),
        Architecture("persimmon", "Persimmon", notes="normalized queries and keys; part of each head is rotated"),
        Architecture("vaultgemma", "VaultGemma", notes="soft cap, sliding window in every other layer"),
        Architecture("aria_text", "Aria (text)", notes="experts"),
        Architecture(
            "cohere2_moe", "Command A+", notes="sliding window in most layers, no positions in the others; experts"
        ),
        Architecture("dots1", "dots.llm1", notes="normalized queries and keys; experts"),
        Architecture(
            "ernie4_5_moe", "ERNIE 4.5 (Mixture of Experts)", notes="pairs of neighbours are rotated; experts"
        ),
        Architecture(
            "exaone_moe",
            "K-EXAONE",
            notes="normalized queries and keys, sliding window in most layers, no positions in the others; experts",
        ),
        Architecture("flex_olmo", "FlexOlmo", notes="normalized queries and keys; experts"),
        Architecture("glm4_moe", "GLM-4.5, GLM-4.6", notes="part of each head is rotated; experts"),
        Architecture(
            "granitemoe", "Granite 3 (Mixture of Experts)", notes="logits and scale by factors of their own; experts"
        ),
        Architecture("granitemoeshared", "Granite 3 (shared experts)", notes="as granitemoe"),
        Architecture("hunyuan_v1_moe", "Hunyuan-A13B", notes="normalized queries and keys; experts"),
        Architecture("hy_v3", "Hy3", notes="normalized queries and keys; experts"),
        Architecture(
            "laguna",
            "Laguna",
            notes="normalized queries and keys, gated output, sliding window in most layers; experts",
        ),
        Architecture("mellum", "Mellum 2", notes="normalized queries and keys, sliding window in most layers; experts"),
        Architecture("minimax_m2", "MiniMax-M2", notes="normalized queries and keys; experts"),
        Architecture("qwen2_moe", "Qwen1.5-MoE, Qwen2 (Mixture of Experts)", notes="experts"),
        Architecture("gpt_oss", "gpt-oss", notes="attention sinks, sliding window in every other layer; experts"),
        Architecture(
            "flint",
            "Flint",
            notes="attention sinks, normalized queries and keys, sliding window in most layers, no positions in the "
            "others; experts",
        ),
        Architecture(
            "granite_swa",
            "Granite (sliding window)",
            notes="attention sinks, sliding window in most layers; logits and scale by factors of their own",
        ),
        Architecture("granitemoe_swa", "Granite (sliding window, experts)", notes="as granite_swa; experts"),
        Architecture("solar_open", "Solar Open", notes="experts"),
        Architecture("diffllama", "DiffLlama", notes="differential attention"),
        Architecture(
            "afmoe",
            "Arcee AFM (Mixture of Experts), Trinity",
            notes="normalized queries and keys, gated output, sliding window in most layers, no positions in the "
            "others; experts",
        ),
        Architecture(
            "beam",
            "Beam",
            notes="as afmoe",
        ),
        Architecture(
            "lfm3",
            "LFM3",
            notes="normalized queries and keys, gated output, sliding window; layers of attention only",
        ),
        Architecture(
            "qwen3_5_text",
            "Qwen3.5 (text)",
            notes="normalized queries and keys, gated output, part of each head is rotated; layers of attention only",
        ),
        Architecture("qwen3_5_moe_text", "Qwen3.5 (text, Mixture of Experts)", notes="as qwen3_5_text; experts"),
        Architecture("qwen3_next", "Qwen3-Next", notes="as qwen3_5_text; experts"),
        Architecture("bert", "BERT", kind="encoder", positions="learned"),
        Architecture(
            "roberta", "RoBERTa, BabyBERTa", kind="encoder", positions="learned", positions_after_padding=True
        ),
        Architecture(
            "modernbert",
            "ModernBERT, Sparse ModernBERT",
            kind="encoder",
            notes="most layers see near tokens only: softmax in standard ops, without statistics",
        ),
        Architecture("xlm-roberta", "XLM-RoBERTa", kind="encoder", positions="learned", positions_after_padding=True),
    )
}

# RoPE variants whose angles depend on the position alone. The angles of other variants change with the length of the
# sequence. "frequency_factors" is the type that `sharp.exporter.checkpoints.gguf.rope` adds to those of transformers.
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional", "frequency_factors")
# The entries of `layer_types` whose layers are attention. Others, such as "linear_attention" and "conv", have a state
# in place of keys and values, or select the keys that a query sees.
ATTENTION_LAYERS = ("full_attention", "sliding_attention")
