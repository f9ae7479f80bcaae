"""Weights without a program, whose model is recognised by names in the file without unpickling anything."""

import json
import re
from pathlib import Path

from sharp.exporter.programs.foreign_files import EXPORT, MOST_BYTES, owner_of, pickle_names

DOCUMENT = "sharp docs your-own-model"
SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")
# Names that transformers gives to the weights of its models.
HUGGING_FACE = re.compile(
    r"model\.(?:layers|decoder\.layers)\.\d+\.self_attn\.|(?:\w+\.)?encoder\.layer\.\d+\.attention\.|gpt_neox\.layers\.\d+\."
    r"|model\.embed_tokens\.weight|h\.\d+\.self_attention\.query_key_value\."
)
LITGPT_FILES = ("lit_model.pth", "model_config.yaml")
# Parts of names in a state dict -> the model's library; the first entry all of whose parts occur counts.
NAMES = (
    (("attn_layers.layers.",), "x-transformers"),
    (("self_attention.core_attention.ssa_n",), "Nemotron-SSA"),
    (("transformer.h.0.attn.c_attn.", "transformer.h.0.attn.a", "transformer.h.0.attn.n"), "SSA"),
    (("self_attn.attn_scale_beta",), "ASEntmax"),
    (("transformer.h.0.attn.c_attn.",), "nanoGPT"),
    (("transformer.h.0.attn.qkv.",), "litgpt"),
    (("transformer.h.0.attn.attn.",), "litgpt"),
    (("model_args", "iter_num", "best_val_loss"), "nanoGPT"),
    (("pytorch-lightning_version",), "Lightning"),
)
BUILD = {
    "x-transformers": "TransformerWrapper with the arguments that it was trained with",
    "SSA": "GPT(GPTConfig(**checkpoint['model_args'])) of omyokun/SSA's GPT2SSA/model.py, with attn.flash = False",
    "Nemotron-SSA": "its layers in PyTorch, with sharp.models.normalized_attention(norm='ssa') and ssa_n_raw and ssa_b "
    "of every layer in the place of omyokun/SSA's SSATritonV4Attention, whose kernels need a GPU",
    "ASEntmax": "SparseGemma2ForCausalLM of deep-spin/asentmax, with use_fast_attn=False",
    "nanoGPT": "GPT(GPTConfig(**checkpoint['model_args']))",
    "Lightning": "of the LightningModule, or of the module in it",
    "litgpt": "litgpt.GPT(litgpt.Config.from_file('model_config.yaml'))",
}


def whose(path: Path) -> str | None:
    """Return a sentence on what a file or folder of weights is and how it is exported.

    None for Sharp's own files, for files that are not recognised, and for files that cannot be read.
    """
    if path.is_dir():
        if (known := owner_of(path)) is not None:
            return known
        if any((*path.glob("*.distcp"), *path.glob("weights/*.distcp"))):  # shards of Megatron and NeMo
            return _sentence(path, None)
        return _sentence(path, "litgpt") if (path / LITGPT_FILES[0]).is_file() else None
    known = owner_of(path)
    if path.suffix not in SUFFIXES:
        return known
    names = _header_names(path) if path.suffix == ".safetensors" else _pickled_names(path)
    if names is None or {"format", "sharp"} <= names or not any(name.endswith((".weight", ".bias")) for name in names):
        return known
    if (path.parent / LITGPT_FILES[1]).is_file():
        return _sentence(path, "litgpt")
    if (path.parent / "config.json").is_file():
        message = f"{path} holds the weights of a Hugging Face model, whose code and tokenizer are named beside it"
        return f"{message}; give the whole folder, {path.parent}"
    owner = next(
        (candidate for parts, candidate in NAMES if all(any(part in name for name in names) for part in parts)), None
    )
    if owner is None and known is None and any(map(HUGGING_FACE.match, names)):
        return (
            f"{path} holds the weights of a Hugging Face model without its config.json: give the whole folder of the "
            "model, with config.json and the tokenizer beside the weights"
        )
    if known is not None:
        return known if owner is None else f"{known}; it is a {owner} model: {BUILD[owner]}; see {DOCUMENT}"
    return _sentence(path, owner)


def _header_names(path: Path) -> set[str] | None:
    """Return the names in the header of a .safetensors file; None if the file is Sharp's own, damaged or no such."""
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(min(int.from_bytes(file.read(8), "little"), MOST_BYTES)))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(header, dict) or "sharp" in (header.get("__metadata__") or {}):
        return None
    return {*header}


def _pickled_names(path: Path) -> frozenset[str] | None:
    """Return the strings in a pickled file, among them its weights' names; None if it is no pickle."""
    names = pickle_names(path)
    return None if names is None else names.texts


def _sentence(path: Path, owner: str | None) -> str:
    """Return the message for a file of weights without code; `owner` is the library that wrote it, None if unknown."""
    build = "of the model's own class" if owner is None else BUILD[owner]
    weights = "weights" if owner is None else f"the weights of a {owner} model"
    return (
        f"{path} holds {weights} and not its code: {EXPORT} {path.name}, or sharp.export(model, ...) in "
        f"Python ({build}); see {DOCUMENT}"
    )
