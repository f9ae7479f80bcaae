"""Weights without a program: whose they are, and what to do. Nothing here is unpickled but tensors and plain data."""

import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DOCUMENT = "docs/your-own-model.md"
# What a name in a state dict contains -> whose model it is. The first that fits.
NAMES = {
    "attn_layers.layers.": "x-transformers",
    "transformer.h.0.attn.c_attn.": "nanoGPT",
    "transformer.h.0.attn.qkv.": "litgpt",
    "transformer.h.0.attn.attn.": "litgpt",
}
BUILD = {
    "x-transformers": "TransformerWrapper with the arguments that it was trained with",
    "nanoGPT": "GPT(GPTConfig(**checkpoint['model_args']))",
    "litgpt": "litgpt.GPT(litgpt.Config.from_file('model_config.yaml'))",
}


def whose(path: Path) -> str | None:
    """One sentence about a file of weights that are not Sharp's: what it is and how it is exported; None for others."""
    if path.is_dir():
        if (path / "lit_model.pth").is_file():
            return _sentence(path, "litgpt")
        return None
    if path.suffix not in (".pt", ".pth", ".ckpt", ".bin") or not zipfile.is_zipfile(path):
        return None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # damaged, or more than plain data
        return None
    state = _state(content)
    if state is None:
        return None
    owner = next((one for part, one in NAMES.items() if any(part in name for name in state)), None)
    if owner is None and isinstance(content, dict) and "model_args" in content:
        owner = "nanoGPT"
    return _sentence(path, owner)


def _state(content: Any) -> dict[str, Tensor] | None:
    """The tensors by name: the content itself, or what usually holds them."""
    if not isinstance(content, dict) or content.get("format") == "sharp":
        return None
    for one in (content, *(content.get(name) for name in ("model", "state_dict", "model_state_dict", "module"))):
        if isinstance(one, dict) and one and all(isinstance(value, Tensor) for value in one.values()):
            return one
    return None


def _sentence(path: Path, owner: str | None) -> str:
    build = "the model's own class" if owner is None else BUILD[owner]
    weights = "weights" if owner is None else f"the weights of a {owner} model"
    return (
        f"{path} holds {weights} and not its code: build it in Python ({build}), load the weights, "
        f"and call sharp.export(model, (token_ids,), norm=..., output=...); see {DOCUMENT}"
    )
