"""Write the JSON files beside this script: outputs of small models of the papers' authors' own classes.

The tests do not run this script, because the repository has none of the authors' code. The script takes the path of a
checkout, and runs in an environment with the versions below:

    python write.py asentmax PATH   # deep-spin/asentmax at be54bd3, transformers 4.46.3, entmax 1.3
    python write.py encoders PATH   # deep-spin/SparseModernBERT at 81ab3ab, transformers 4.48.3, entmax 1.3
    python write.py ssa PATH        # omyokun/SSA's GPT2SSA at fe5f83b, PyTorch 2.13
    python write.py gates PATH      # qiuzh20/gated_attention at 49645df, transformers 4.51.3

The weights come from `weights.py`, so that no file holds them. The authors' code imports kernels for GPUs, which do not
run here. Functions that the kernels' documentation describes stand in for the kernels of the paths `use_fast_attn` and
`use_triton_entmax`: causal softmax with ALiBi for flash-attn, entmax by bisection for adasplash. All other code is the
authors' own, unchanged.
"""

import importlib
import itertools
import json
import math
import sys
import types
from pathlib import Path
from typing import Any

import torch
from weights import weights

HERE = Path(__file__).parent
IDS = torch.randint(3, 16, (2, 8), generator=torch.Generator().manual_seed(1))
MASK = torch.ones_like(IDS)
PADDED = MASK.clone()
PADDED[1, 6:] = 0
SIZES = {
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "attn_implementation": "eager",
}
GEMMA = {
    **SIZES,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "sliding_window": 4,
    "query_pre_attn_scalar": 9,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
    "tie_word_embeddings": False,
    "rope_scaling": {"rope_type": "default"},
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
POSITIONS = {
    "rope": {"apply_rotary": True, "apply_nape": False},
    "nape": {"apply_rotary": False, "apply_nape": True},
    "none": {"apply_rotary": False, "apply_nape": False},
}
SCALES = {
    "plain": {"attn_scale_type": None},
    "nakanishi": {"attn_scale_type": "nakanishi"},
    "learn": {"attn_scale_type": "learn"},
    "adapt": {"attn_scale_type": "adapt-softplus-tanh"},
    "adapt-bias": {"attn_scale_type": "adapt-softplus-tanh", "attn_scale_proj_bias": True},
}


def without_kernels(*names: str) -> None:
    """Put empty modules in the place of modules that need a GPU."""
    for name in names:
        module = types.ModuleType(name)
        module.__getattr__ = lambda attribute: None if attribute.startswith("__") else object  # type: ignore[method-assign]
        sys.modules[name] = module


@torch.no_grad()
def filled(model: torch.nn.Module) -> dict[str, list[int]]:
    """Give the model the weights of `weights.py`, and return the shapes of its parameters."""
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    made = weights(shapes)
    for name, parameter in model.named_parameters():
        parameter.copy_(torch.from_numpy(made[name]))
    model.eval()
    return shapes


def case(name: str, model: torch.nn.Module, mask: torch.Tensor, changes: dict[str, Any], **call: Any) -> dict[str, Any]:
    shapes = filled(model)
    with torch.no_grad():
        output = model(input_ids=IDS, attention_mask=mask, **call)
    found = getattr(output, "logits", None)
    return entry(name, output.last_hidden_state if found is None else found, shapes, changes)


def entry(name: str, output: torch.Tensor, shapes: dict[str, list[int]], changes: dict[str, Any]) -> dict[str, Any]:
    digits = [float(f"{number:.6g}") for number in output.flatten().tolist()]
    return {"name": name, "config": changes, "shapes": shapes, "output": digits}


def write(file: str, base: dict[str, Any], cases: list[dict[str, Any]]) -> None:
    """Write one line per case, after a line of what all cases share."""

    shared = {
        name: shape
        for name, shape in cases[0]["shapes"].items()
        if all(case["shapes"].get(name) == shape for case in cases)
    }

    for case in cases:
        case["shapes"] = {name: shape for name, shape in case["shapes"].items() if name not in shared}
    head = json.dumps({"base": base, "shapes": shared, "input_ids": IDS.tolist(), "padded": PADDED.tolist()})
    (HERE / file).write_text("\n".join([head, *map(json.dumps, cases)]) + "\n")


def attention(query, key, value, weigh, scale, slopes, length):  # type: ignore[no-untyped-def]
    """Compute causal attention [batch, heads, tokens, head_dim] with ALiBi as the kernels' documentation defines it."""
    del length  # the sequences have no padding
    tokens = query.shape[2]
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)[None, :]
    logits = query @ key.transpose(2, 3) * scale
    if slopes is not None:
        logits = logits - slopes.view(1, -1, 1, 1) * distance
    return weigh(logits.masked_fill(distance < 0, -math.inf)) @ value


def write_asentmax(path: Path) -> None:
    sys.path.insert(0, str(path / "synthetic"))
    without_kernels(
        "adasplash",
        "src.attention.flash_attn",
        "src.attention.topk",
        "src.attention.stickbreaking",
        "src.attention.stickbreaking.sb_attn_layer",
        "src.kernels.adasplash.adasplash_no_block_mask",
    )
    for package in ("src", "src.models", "src.models.architectures", "src.attention", "src.kernels"):
        module = types.ModuleType(package)
        module.__path__ = [str(path / "synthetic" / package.replace(".", "/"))]
        sys.modules[package] = module
    import entmax
    from transformers import Gemma2Config

    def flash(query, key, value, mask, tokens, *, softmax_scale, alibi_slopes, **_):  # type: ignore[no-untyped-def]
        heads = [tensor.transpose(1, 2) for tensor in (query, key, value)]
        return attention(*heads, lambda z: z.softmax(-1), softmax_scale, alibi_slopes, tokens).transpose(1, 2)

    def sparse(query, key, value, *, alpha, varlen, alibi_slopes, **_):  # type: ignore[no-untyped-def]
        def weigh(logits: torch.Tensor) -> torch.Tensor:
            return entmax.entmax_bisect(logits.clamp(min=-1e9), alpha, dim=-1)

        return attention(query, key, value, weigh, query.shape[-1] ** -0.5, alibi_slopes, varlen)

    own: Any = importlib.import_module("src.models.architectures.sparse_gemma")
    own._flash_attention_forward, own.sparse_attn = flash, sparse
    cases = []
    for (scale, scaled), (where, positions), fast in itertools.product(
        SCALES.items(), POSITIONS.items(), (False, True)
    ):
        for alpha, poly in ((1.0, False), (1.0, True), (1.5, False)):
            chosen = {"entmax_alpha": alpha, **scaled, **positions, "use_fast_attn": fast, "poly_fit": poly}
            model = own.SparseGemma2ForCausalLM(Gemma2Config(**GEMMA, **chosen))
            parts = [f"{alpha:g}", scale, *(["poly"] if poly else []), where, *(["fast"] if fast else [])]
            chosen["architectures"] = ["SparseGemma2ForCausalLM"]
            cases.append(case("-".join(parts), model, MASK, chosen, use_cache=False))
    write("asentmax.jsonl", {**GEMMA, "model_type": "gemma2"}, cases)


def write_encoders(path: Path) -> None:
    sys.path.insert(0, str(path))
    without_kernels("adasplash")
    import entmax
    from transformers import ModernBertConfig, RobertaConfig

    sys.modules["adasplash"].triton_entmax = lambda z, alpha, n_iter, fast_math: entmax.entmax_bisect(z, alpha, dim=-1)  # type: ignore[attr-defined]
    bert: Any = importlib.import_module("sparse_modern_bert")
    roberta: Any = importlib.import_module("sparse_roberta")
    tokens = {"pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}
    modern = {**SIZES, **tokens, "num_hidden_layers": 3, "local_attention": 4, "global_attn_every_n_layers": 2}
    modern |= {"reference_compile": False, "model_type": "modernbert", "num_labels": 3}
    plain = {**SIZES, **tokens, "type_vocab_size": 1, "model_type": "roberta", "num_labels": 3}
    cases = []
    for kind, made, base, module in (
        ("ModernBert", ModernBertConfig, modern, bert),
        ("Roberta", RobertaConfig, plain, roberta),
    ):
        for suffix, alpha in (
            *(("ForMaskedLM", alpha) for alpha in (None, 1.0, 1.3, 1.5, 2.0)),
            *(("ForSequenceClassification", None), ("Model", None)),
        ):
            config = made(**base)
            if alpha is not None:
                config.initial_alpha = alpha
            name = f"Custom{kind}{suffix}"
            model = getattr(module, name)(config)
            saved = {"initial_alpha": config.initial_alpha} if hasattr(config, "initial_alpha") else {}
            written = {**base, **saved, "architectures": [name]}
            written.pop("attn_implementation")
            label = "default" if alpha is None else f"{alpha:g}"
            cases.append(case(f"{kind}{suffix}-{label}", model, PADDED, written))
    write("encoders.jsonl", {}, cases)


def write_ssa(path: Path) -> None:
    sys.path.insert(0, str(path))
    own: Any = importlib.import_module("model")
    arguments = {"block_size": 32, "vocab_size": 16, "n_layer": 2, "n_head": 4, "n_embd": 16, "bias": False}
    cases = []
    for flash in (True, False):
        if not flash:
            # without this function, as in PyTorch 1, the authors' class computes its own attention
            del torch.nn.functional.scaled_dot_product_attention
        for name, learned in (("start", (1.0, 0.4)), ("n-below-1", (0.5, -0.7)), ("learned", (-0.6, 0.9))):
            model = own.GPT(own.GPTConfig(**arguments))
            shapes = filled(model)
            with torch.no_grad():
                for layer in model.transformer.h:
                    for parameter, value in zip((layer.attn.a, layer.attn.n), learned, strict=True):
                        parameter.fill_(value)
                logits, _ = model(IDS, targets=IDS)
            changes = {"a": learned[0], "n": learned[1], "mask": not flash}
            cases.append(entry(f"{'flash' if flash else 'slow'}-{name}", logits, shapes, changes))
    write("ssa.jsonl", arguments, cases)


def write_gates(path: Path) -> None:
    package = types.ModuleType("gated_attention")
    package.__path__ = [str(path)]
    sys.modules["gated_attention"] = package
    made = importlib.import_module("gated_attention.configuration_qwen3").Qwen3Config
    own: Any = importlib.import_module("gated_attention.modeling_qwen3")
    base = {**SIZES, "num_key_value_heads": 2, "head_dim": 6, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    base |= {"qkv_bias": False, "attention_bias": False, "use_sliding_window": False, "tie_word_embeddings": True}
    cases = []
    for name, chosen in {
        "none": {},
        "headwise": {"headwise_attn_output_gate": True},
        "elementwise": {"elementwise_attn_output_gate": True},
        "both": {"headwise_attn_output_gate": True, "elementwise_attn_output_gate": True},
        "headwise-bias": {"headwise_attn_output_gate": True, "qkv_bias": True, "tie_word_embeddings": False},
        "elementwise-plain": {"elementwise_attn_output_gate": True, "use_qk_norm": False, "attention_bias": True},
    }.items():
        config = made(**base, **{key: value for key, value in chosen.items() if key not in base})
        for key in chosen.keys() & base.keys():
            setattr(config, key, chosen[key])
        model = own.Qwen3ForCausalLM(config)
        gates = {f"{kind}_attn_output_gate": False for kind in ("headwise", "elementwise")}
        written = {"use_qk_norm": True, **gates, **chosen, "architectures": ["Qwen3ForCausalLM"]}
        cases.append(case(f"gate-{name}", model, MASK, written, use_cache=False))
    base.pop("attn_implementation")
    write("gates.jsonl", {**base, "model_type": "qwen3"}, cases)


if __name__ == "__main__":
    writers = {"asentmax": write_asentmax, "encoders": write_encoders, "ssa": write_ssa, "gates": write_gates}
    writers[sys.argv[1]](Path(sys.argv[2]))
