"""Weights without a program: whose they are, and what to do. Names are read from the file; nothing is unpickled."""

import json
import pickletools
import zipfile
from pathlib import Path

DOCUMENT = "docs/your-own-model.md"
SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")
MOST_BYTES = 2**26  # of the pickle or the header, which name tensors and do not hold them
MOST_NAMES = 2**20
LITGPT_FILES = ("lit_model.pth", "model_config.yaml")
# What names in a state dict contain -> whose model it is. The first that fits.
NAMES = (
    (("attn_layers.layers.",), "x-transformers"),
    (("self_attention.core_attention.ssa_n",), "Nemotron-SSA"),
    (("transformer.h.0.attn.c_attn.", "transformer.h.0.attn.a", "transformer.h.0.attn.n"), "SSA"),
    (("self_attn.attn_scale_beta",), "ASEntmax"),
    (("transformer.h.0.attn.c_attn.",), "nanoGPT"),
    (("transformer.h.0.attn.qkv.",), "litgpt"),
    (("transformer.h.0.attn.attn.",), "litgpt"),
    (("model_args", "iter_num", "best_val_loss"), "nanoGPT"),
)
BUILD = {
    "x-transformers": "TransformerWrapper with the arguments that it was trained with",
    "SSA": "GPT(GPTConfig(**checkpoint['model_args'])) of omyokun/SSA's GPT2SSA/model.py, with attn.flash = False",
    "Nemotron-SSA": "its layers in PyTorch, with sharp.models.normalized_attention(norm='ssa') and ssa_n_raw and ssa_b "
    "of every layer in the place of omyokun/SSA's SSATritonV4Attention, whose kernels need a GPU",
    "ASEntmax": "SparseGemma2ForCausalLM of deep-spin/asentmax, with use_fast_attn=False",
    "nanoGPT": "GPT(GPTConfig(**checkpoint['model_args']))",
    "litgpt": "litgpt.GPT(litgpt.Config.from_file('model_config.yaml'))",
}


def whose(path: Path) -> str | None:
    """One sentence about a file of weights that are not Sharp's: what it is and how it is exported; None for others."""
    if path.is_dir():
        if any((*path.glob("*.distcp"), *path.glob("weights/*.distcp"))):  # of Megatron and NeMo
            return _sentence(path, None)
        return _sentence(path, "litgpt") if (path / LITGPT_FILES[0]).is_file() else None
    if path.suffix not in SUFFIXES:
        return None
    names = _header_names(path) if path.suffix == ".safetensors" else _names(path)
    if names is None or {"format", "sharp"} <= names or not any(name.endswith((".weight", ".bias")) for name in names):
        return None
    if (path.parent / LITGPT_FILES[1]).is_file():
        return _sentence(path, "litgpt")
    if (path.parent / "config.json").is_file():
        message = f"{path} holds the weights of a Hugging Face model, whose code and tokenizer are named beside it"
        return f"{message}; give the whole folder, {path.parent}"
    fitting = (owner for parts, owner in NAMES if all(any(part in name for name in names) for part in parts))
    return _sentence(path, next(fitting, None))


def _names(path: Path) -> set[str] | None:
    """The texts in the pickle of a file of torch.save; None where it is none, or an old or damaged one."""
    found: set[str] = set()
    try:
        with zipfile.ZipFile(path) as archive:
            pickles = [one for one in archive.infolist() if one.filename.endswith("/data.pkl")]
            if len(pickles) != 1 or pickles[0].file_size > MOST_BYTES:
                return None
            for _, argument, _ in pickletools.genops(archive.read(pickles[0])):
                if isinstance(argument, str) and len(found) < MOST_NAMES:
                    found.add(argument)
    except (zipfile.BadZipFile, ValueError, OSError, EOFError, NotImplementedError, RuntimeError):
        return None
    return found


def _header_names(path: Path) -> set[str] | None:
    """The names in the header of a .safetensors file; None where it is Sharp's own, or none, or damaged."""
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(min(int.from_bytes(file.read(8), "little"), MOST_BYTES)))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(header, dict) or "sharp" in (header.get("__metadata__") or {}):
        return None
    return {*header}


def _sentence(path: Path, owner: str | None) -> str:
    build = "the model's own class" if owner is None else BUILD[owner]
    weights = "weights" if owner is None else f"the weights of a {owner} model"
    return (
        f"{path} holds {weights} and not its code: build it in Python ({build}), load the weights, "
        f"and call sharp.export(model, (token_ids,), norm=..., output=...); see {DOCUMENT}"
    )
