"""Writes the folders beside it: small random models of the papers' authors' own classes, and what those compute.

Not run by the tests, which have none of the authors' code. It takes the path of a checkout and an environment that it
runs in:

    python write.py asentmax PATH   # deep-spin/asentmax at be54bd3, transformers 4.46.3, entmax 1.3
    python write.py modernbert PATH  # deep-spin/SparseModernBERT at 81ab3ab, transformers 4.48.3, entmax 1.3
    python write.py ssa PATH        # omyokun/SSA at fe5f83b

Attention is the classes' eager one; kernels for GPUs, which they import, are left out.
"""

import importlib
import json
import sys
import types
from pathlib import Path

import torch

HERE = Path(__file__).parent
IDS = torch.randint(3, 32, (2, 14), generator=torch.Generator().manual_seed(1))
GEMMA = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 32,
    "sliding_window": 32,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
    "attn_scale_proj_bias": True,
    "rope_scaling": {"rope_type": "default"},
}
GEMMAS = {
    "asentmax-nape": {"entmax_alpha": 1.5, "attn_scale_type": "adapt-softplus-tanh", "apply_nape": True},
    "sentmax-nape": {"entmax_alpha": 1.5, "attn_scale_type": "learn", "apply_nape": True},
    "ssmax-rope": {"entmax_alpha": 1.0, "attn_scale_type": "nakanishi", "apply_nape": False},
}


def without_kernels(*names: str) -> None:
    """Empty modules in the place of those that need a GPU."""
    for name in names:
        module = types.ModuleType(name)
        module.__getattr__ = lambda attribute: None if attribute.startswith("__") else object  # type: ignore[method-assign]
        sys.modules[name] = module


@torch.no_grad()
def randomized(model: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.eval()


def save_logits(folder: Path, logits: torch.Tensor) -> None:
    content = {"input_ids": IDS.tolist(), "logits": [[[round(x, 6) for x in t] for t in s] for s in logits.tolist()]}
    (folder / "expected.json").write_text(json.dumps(content))


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
    from transformers import Gemma2Config

    own = importlib.import_module("src.models.architectures.sparse_gemma")
    for name, chosen in GEMMAS.items():
        rotary = not chosen["apply_nape"]
        config = Gemma2Config(**{**GEMMA, **chosen, "apply_rotary": rotary})
        torch.manual_seed(0)
        model = randomized(own.SparseGemma2ForCausalLM(config))
        with torch.no_grad():
            logits = model(input_ids=IDS, attention_mask=torch.ones_like(IDS), use_cache=False).logits
        model.save_pretrained(HERE / name)
        save_logits(HERE / name, logits)


def write_modernbert(path: Path) -> None:
    sys.path.insert(0, str(path))
    without_kernels("adasplash")
    import entmax
    from transformers import ModernBertConfig

    sys.modules["adasplash"].triton_entmax = lambda z, alpha, n_iter, fast_math: entmax.entmax_bisect(z, alpha, dim=-1)  # type: ignore[attr-defined]
    own = importlib.import_module("sparse_modern_bert")
    config = ModernBertConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=32,
        local_attention=6,
        global_attn_every_n_layers=2,
        pad_token_id=0,
        cls_token_id=1,
        sep_token_id=2,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation="eager",
        reference_compile=False,
    )
    config.initial_alpha = 1.5
    config.use_triton_entmax = False
    torch.manual_seed(0)
    model = randomized(own.CustomModernBertForMaskedLM(config))
    with torch.no_grad():
        logits = model(input_ids=IDS, attention_mask=torch.ones_like(IDS)).logits
    model.save_pretrained(HERE / "sparse-modernbert")
    save_logits(HERE / "sparse-modernbert", logits)


def write_ssa(path: Path) -> None:
    sys.path.insert(0, str(path))
    own = importlib.import_module("model")
    del torch.nn.functional.scaled_dot_product_attention  # as the authors do, so that their own attention is computed
    arguments = {"block_size": 32, "vocab_size": 32, "n_layer": 2, "n_head": 4, "n_embd": 16, "bias": False}
    torch.manual_seed(0)
    model = randomized(own.GPT(own.GPTConfig(**arguments)))
    with torch.no_grad():
        logits, _ = model(IDS, targets=IDS)
    folder = HERE / "ssa-gpt2"
    folder.mkdir(exist_ok=True)
    torch.save({"model": model.state_dict(), "model_args": arguments, "iter_num": 0}, folder / "ckpt.pt")
    save_logits(folder, logits)


if __name__ == "__main__":
    {"asentmax": write_asentmax, "modernbert": write_modernbert, "ssa": write_ssa}[sys.argv[1]](Path(sys.argv[2]))
