"""Checkpoints of the SSA authors' nanoGPT (omyokun/SSA, GPT2SSA): GPT-2 whose layers have learned b = e^a and e^n."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from sharp.models.adapted_model import VERSION, AdaptedNorm, attach, attention_norms, find_attention
from sharp.models.checkpoint_files import read_torch_file
from sharp.models.config import MOST_LAYERS, MOST_SIZE
from sharp.models.norms import SsaValues
from sharp.plugins.errors import InputError

ARGUMENTS = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")
PREFIXES = ("_orig_mod.", "module.")  # of torch.compile and of distributed training
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")  # GPT-2 has Conv1D


def is_ssa_nano_gpt(path: Path) -> bool:
    """Whether `path` is such a file; a damaged one is none."""
    if path.suffix != ".pt" or not path.is_file():
        return False
    try:
        content = read_torch_file(path)
    except InputError:
        return False
    return isinstance(content, dict) and "model_args" in content and "transformer.h.0.attn.a" in _state(path, content)


@torch.no_grad()
def read_ssa_nano_gpt(path: Path) -> tuple[PreTrainedModel, AdaptedNorm]:
    """The model as GPT-2 of transformers, with SSA in its attention modules.

    Raises:
        InputError: the file is damaged, or does not hold what its `model_args` describe.
    """
    content = read_torch_file(path)
    arguments, state = content["model_args"], _state(path, content)
    if not isinstance(arguments, dict):
        raise InputError(f"{path} is damaged: its model_args are no dictionary; copy it again")
    for name in ARGUMENTS:
        most = MOST_LAYERS if name == "n_layer" else MOST_SIZE
        if not isinstance(arguments.get(name), int) or not 1 <= arguments[name] <= most:
            raise InputError(f"{path}: its model_args have {name} {arguments.get(name)!r}, but must have 1 to {most}")
    config = GPT2Config(
        vocab_size=arguments["vocab_size"],
        n_positions=arguments["block_size"],
        n_embd=arguments["n_embd"],
        n_layer=arguments["n_layer"],
        n_head=arguments["n_head"],
        activation_function="gelu",
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.device("meta"):
        shapes = {name: one.shape for name, one in GPT2LMHeadModel(config).named_parameters()}
    weights: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        value = state.get(name)
        if value is None and name.endswith(".bias"):
            value = torch.zeros(shape)  # nanoGPT has models without
        elif value is not None and name.endswith(TRANSPOSED):
            value = value.t()
        if value is None or value.shape != shape:
            raise InputError(f"{path} is incomplete: the weights of {name} are missing or have another shape")
        weights[name] = value.float()
        if not weights[name].isfinite().all():
            raise InputError(f"{path}: the weights of {name} are not all finite; copy the checkpoint again")
    model = GPT2LMHeadModel(config).eval()
    model.load_state_dict(weights, strict=False)
    modules = find_attention(model)
    heads = config.n_head
    described = AdaptedNorm(
        "ssa",
        modules,
        q_heads=heads,
        hidden_size=config.n_embd,
        trained_context=config.n_positions,
        version=VERSION,
    )
    attach(model, described)
    for layer, norm in enumerate(attention_norms(model)):
        b, n = (_exponential(path, state, f"transformer.h.{layer}.attn.{name}") for name in ("a", "n"))
        if n < 1:
            raise InputError(f"{path}: ssa has n of at least 1, but layer {layer} has {n:g}")
        norm.head_parameters = SsaValues(torch.tensor([[b, n]] * heads))
    return model, described


def _exponential(path: Path, state: dict[str, Tensor], name: str) -> float:
    value = state.get(name)
    if value is None or value.numel() != 1 or not value.isfinite().all():
        raise InputError(f"{path}: {name} is missing, or no finite number; copy the checkpoint again")
    return float(value.float().exp())


def _state(path: Path, content: dict[str, Any]) -> dict[str, Tensor]:
    state = content.get("model")
    if not isinstance(state, dict) or not all(isinstance(one, Tensor) for one in state.values()):
        raise InputError(f"{path} is damaged: its entry 'model' holds no weights; copy it again")
    found = {}
    for name, tensor in state.items():
        for prefix in PREFIXES:
            name = name.removeprefix(prefix)
        found[name] = tensor
    return found
