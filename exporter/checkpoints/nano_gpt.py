"""The reader of checkpoints of the SSA authors' nanoGPT (omyokun/SSA, GPT2SSA).

The model is GPT-2. The layers have learned a and n; SSA's parameters are e^a and e^n.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from sharp.core.errors import InputError
from sharp.exporter.sources.unknown_keys import UnusedKeys, check_keys
from sharp.models.adapted_model import VERSION, AdaptedNorm, attach, attention_norms, find_attention
from sharp.models.checkpoint_files import read_torch_file
from sharp.models.config import MOST_LAYERS, MOST_SIZE
from sharp.models.ssa_parameters import SsaValues

ARGUMENTS = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")
HARMLESS_ARGUMENTS = {"dropout": "for training only", "bias": "the weights say whether there are biases"}
START = {"a": 1.0, "n": 0.4}  # the values before the first step of training
HARMLESS_ENTRIES = dict.fromkeys(("optimizer", "iter_num", "best_val_loss", "config"), "for going on with the training")
MASK = ".attn.bias"  # the causal mask, which the authors' class has as a buffer if it computes SSA
PREFIXES = ("_orig_mod.", "module.")  # torch.compile and distributed training put these before names
OWN_STATE = ("lm_head.weight", "transformer.h.*.attn.a", "transformer.h.*.attn.n", f"transformer.h.*{MASK}")
# transformers' GPT-2 has Conv1D, whose weights are transposed.
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


def is_ssa_nano_gpt(path: Path) -> bool:
    """Whether `path` is a checkpoint of the SSA authors' nanoGPT; False for files that cannot be read as one."""
    if path.suffix != ".pt" or not path.is_file():
        return False
    try:
        content = read_torch_file(path)
        return (
            isinstance(content, dict) and "model_args" in content and "transformer.h.0.attn.a" in _state(path, content)
        )
    except InputError:
        return False


@dataclass(frozen=True)
class NanoGpt:
    """A model of the SSA authors' code; `described` is the norm that it was trained with, None for softmax."""

    model: PreTrainedModel
    described: AdaptedNorm | None
    unused: tuple[UnusedKeys, ...]


@torch.no_grad()
def read_ssa_nano_gpt(path: Path, norm: str | None, ignore: Sequence[str]) -> NanoGpt:
    """Return the model as GPT-2 of transformers, with SSA in its attention modules unless it was trained with softmax.

    `norm` is the norm of the export. It is taken for the trained norm if the file does not show whether that is softmax
    or SSA. `ignore` has unknown keys that the user says change nothing.

    Raises:
        InputError: the file is damaged, or does not hold what its `model_args` describe, or its norm is not known.
    """
    content = read_torch_file(path)
    arguments, state = content["model_args"], _state(path, content)
    trained = trained_norm_of(path, state, norm)
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
        shapes = {name: parameter.shape for name, parameter in GPT2LMHeadModel(config).named_parameters()}
    weights: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        value = state.get(name)
        if value is None and name.endswith(".bias"):
            value = torch.zeros(shape)  # nanoGPT can train models without biases
        elif value is not None and name.endswith(TRANSPOSED):
            value = value.t()
        if value is None or value.shape != shape:
            raise InputError(
                f"{path} is incomplete: the weights of {name} are missing or have another shape; copy it again"
            )
        weights[name] = value.float()
        if not weights[name].isfinite().all():
            raise InputError(f"{path}: the weights of {name} are not all finite; copy the checkpoint again")
    model = GPT2LMHeadModel(config).eval()
    model.load_state_dict(weights, strict=False)
    _check_state(path, state)
    unused = (
        check_keys(path, "the file", content, used=("model", "model_args"), harmless=HARMLESS_ENTRIES, ignore=ignore),
        check_keys(path, "model_args", arguments, used=ARGUMENTS, harmless=HARMLESS_ARGUMENTS, ignore=ignore),
        check_keys(path, "weights", state, used=(*weights, *OWN_STATE), ignore=ignore, tensors=True),
    )
    if trained == "softmax":
        return NanoGpt(model, None, unused)
    heads = config.n_head
    described = AdaptedNorm(
        "ssa",
        find_attention(model),
        q_heads=heads,
        hidden_size=config.n_embd,
        trained_context=config.n_positions,
        version=VERSION,
    )
    attach(model, described)
    for layer, own in enumerate(attention_norms(model)):
        b, n = (_exponential(path, state, f"transformer.h.{layer}.attn.{name}") for name in ("a", "n"))
        own.head_parameters = SsaValues(torch.tensor([[b, n]] * heads))
    return NanoGpt(model, described, unused)


def trained_norm_of(path: Path, state: Mapping[str, Tensor], norm: str | None) -> str:
    """Return the norm that the layers of `state` were trained with: ssa, or softmax.

    `norm` is the norm of the export, which decides if the weights do not. `path` is for messages.

    The authors' class has an attribute `flash`, which is on by default in PyTorch 2. With `flash`, attention is
    PyTorch's softmax: a and n get no gradient and keep their start values, and the layers have no mask.

    Raises:
        InputError: a and n have their start values and there is no mask, but `norm` is neither softmax nor ssa.
    """
    unchanged = all(
        bool((value == torch.tensor(START[name[-1]], dtype=value.dtype)).all())
        for name, value in state.items()
        if re.fullmatch(r"transformer\.h\.\d+\.attn\.[an]", name)
    )
    if not unchanged or any(name.endswith(MASK) for name in state):
        return "ssa"
    if norm in ("softmax", "ssa"):
        return norm
    raise InputError(
        f"{path} has a {START['a']} and n {START['n']} in every layer, as before the first step, and no "
        "mask: its attention was PyTorch's (flash), so it was trained with softmax; say --norm softmax, or --norm ssa "
        "if it was not"
    )


def _check_state(path: Path, state: Mapping[str, Tensor]) -> None:
    """Refuse a mask that is not causal, and an output layer that differs from the embedding. GPT-2 has neither.

    Raises:
        InputError: the checkpoint has such a mask or output layer.
    """
    for name, value in state.items():
        if name.endswith(MASK) and not (value.ndim == 4 and torch.equal(value, torch.ones_like(value).tril())):
            raise InputError(f"{path}: {name} is not the causal mask, and Sharp has no other; use the authors' class")
    head, embedding = state.get("lm_head.weight"), state["transformer.wte.weight"]
    if head is not None and not torch.equal(head, embedding):
        raise InputError(
            f"{path}: lm_head.weight differs from transformer.wte.weight, which the authors' class ties; save the "
            "model again with that class"
        )


def _exponential(path: Path, state: dict[str, Tensor], name: str) -> float:
    """Return e to the scalar weight `name` of the checkpoint. InputError if it is missing or not finite."""
    value = state.get(name)
    if value is None or value.numel() != 1 or not value.isfinite().all():
        raise InputError(f"{path}: {name} is missing, or no finite number; copy the checkpoint again")
    return float(value.float().exp())


def _state(path: Path, content: dict[str, Any]) -> dict[str, Tensor]:
    """Return the checkpoint's weights by name, without the prefixes of wrappers such as torch.compile.

    Raises:
        InputError: the entry `model` is no dict of tensors.
    """
    state = content.get("model")
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise InputError(f"{path} is damaged: its entry 'model' holds no weights; copy it again")
    found = {}
    for name, tensor in state.items():
        for prefix in PREFIXES:
            name = name.removeprefix(prefix)
        found[name] = tensor
    return found
