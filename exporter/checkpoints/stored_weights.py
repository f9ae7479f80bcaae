"""Checks of the tensors in a Hugging Face folder that transformers silently leaves out of the model.

Earlier versions of transformers stored masks, positions and angles. Their values are compared with what the model
computes, because a name alone proves nothing. Tensors that are stored twice, or that contradict each other or the
configuration, are refused.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from sharp.core.errors import InputError

ANGLES = "inv_freq"
MASKS = ("bias", "causal_mask")
MASKED = ("masked_bias",)  # the value that masked logits are set to
POSITIONS = ("position_ids",)
BUFFERS = (ANGLES, *MASKS, *MASKED, *POSITIONS)
MOST_DIFFERENCE = 1e-2  # relative difference of angles, which may be stored as bfloat16
LEAST_MASKED = 1e3
MASK_DIMENSIONS = 4  # [1, 1, queries, keys]
FLOATS = ("F64", "F32", "F16", "BF16")
# Weights for other programs, which publishers put into the same folder.
OTHER_FILES = re.compile(r"(consolidated|original|tokenizer|adapter_model)[\w.-]*\.safetensors")


@dataclass(frozen=True)
class LeftOut:
    """The names of tensors that the model has no place for.

    Tensors in `refused` may change numbers. Tensors in `parts` belong to parts that the architecture's class says it
    leaves out, such as layers that only draft tokens.
    """

    refused: tuple[str, ...]
    parts: tuple[str, ...]


def check_files(path: Path) -> None:
    """Refuse a folder that has safetensors files which transformers does not read.

    Raises:
        InputError: the folder has such a file, or its weights twice.
    """
    found = {shard.name for shard in _shards(path)}
    indices = sorted(path.glob("*.safetensors.index.json"))
    whole = "model.safetensors"
    named = {shard for index in indices for shard in json.loads(index.read_bytes())["weight_map"].values()}
    if whole in found and named - {whole}:
        raise InputError(f"{path} has its weights twice, in {whole} and in the files of {indices[0].name}; remove one")
    read = {whole} if whole in found else named
    if others := sorted(found - read):
        raise InputError(
            f"{path} has {others[0]} beside the weights that transformers reads; remove it if it is not needed"
        )


def check_types(path: Path) -> None:
    """Refuse weights that are not floating-point numbers. Integers are quantized weights, whose scales nobody applies.

    Raises:
        InputError: a weight has another type.
    """
    for shard in _shards(path):
        with safe_open(shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - a safetensors file is no mapping
                stored, last = file.get_slice(name), name.rpartition(".")[2]
                kind, dimensions = stored.get_dtype(), len(stored.get_shape())
                is_buffer = last in BUFFERS and (last != "bias" or dimensions == MASK_DIMENSIONS)
                if kind not in FLOATS and not is_buffer:
                    raise InputError(
                        f"{path}: {name} is of type {kind}, and Sharp reads floating-point weights only; export the "
                        "model that this one was made from, with --quantize int8 or int4"
                    )


def left_out(path: Path, model: PreTrainedModel, unexpected: Sequence[str]) -> LeftOut:
    """Return the tensors in folder `path` that `model` has no place for and does not compute by itself.

    `unexpected` has the tensors that transformers' loader reports as unexpected; it does not report all.

    Raises:
        InputError: a weight is stored twice, or tensors contradict each other or the configuration.
    """
    prefix = model.base_model_prefix
    taken = {_place(name, prefix) for name, _ in model.named_parameters(remove_duplicate=False)}
    refused, parts = set(unexpected), set[str]()
    silent = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    places: dict[str, str] = {}
    shards: dict[str, Path] = {}
    for shard in _shards(path):
        with safe_open(shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - a safetensors file is no mapping
                place, last = _place(name, prefix), name.rpartition(".")[2]
                if place in places:
                    raise InputError(
                        f"{path} has one weight twice, as {places[place]} and as {name}; remove one of them"
                    )
                places[place], shards[name] = name, shard
                if place in taken:
                    continue
                if last in BUFFERS and _is_computed(last, file.get_tensor(name), model):
                    refused.discard(name)
                elif patterns := [pattern.pattern for pattern in silent if pattern.search(name)]:
                    (refused if "bias" in patterns[0] else parts).add(name)
                elif last in (ANGLES, *MASKED, *POSITIONS):
                    refused.add(name)
    _check_embeddings(path, model)
    _check_biases(path, shards)
    return LeftOut(tuple(sorted(refused)), tuple(sorted(parts)))


def _check_embeddings(path: Path, model: PreTrainedModel) -> None:
    """Refuse input and output embeddings that are tied by the configuration but differ in the folder.

    Raises:
        InputError: they differ.
    """
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if not (getattr(model.config, "tie_word_embeddings", False) and isinstance(head, nn.Linear)):
        return
    if isinstance(embeddings, nn.Embedding) and not torch.equal(head.weight, embeddings.weight):
        raise InputError(
            f"{path} says that input and output embeddings are one (tie_word_embeddings), and has two that differ; "
            "remove one of them, or set tie_word_embeddings to false"
        )


def _check_biases(path: Path, shards: Mapping[str, Path]) -> None:
    """Refuse differing values of the bias of an encoder's output layer, which is stored under two names.

    `shards` maps the name of each tensor to its file.

    Raises:
        InputError: the two values differ.
    """
    for name in shards:
        partner = f"{name.removesuffix('.decoder.bias')}.bias"
        if not name.endswith(".decoder.bias") or partner not in shards:
            continue
        first, second = (_read(shards[tensor], tensor) for tensor in (name, partner))
        if not torch.equal(first, second):
            raise InputError(
                f"{path} has {name} and {partner}, which are one in the model, and differ; remove one of them"
            )


def _shards(path: Path) -> list[Path]:
    """Return the files of weights in a folder, without those for other programs."""
    return [shard for shard in sorted(path.glob("*.safetensors")) if not OTHER_FILES.fullmatch(shard.name)]


def _read(shard: Path, name: str) -> Tensor:
    """Return the tensor `name` of a safetensors file."""
    with safe_open(shard, framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
        return tensor


def _place(name: str, prefix: str) -> str:
    """Return the name of a tensor without the prefix of the base model, which may be there several times."""
    while prefix and name.startswith(f"{prefix}."):
        name = name.removeprefix(f"{prefix}.")
    return name


def _is_computed(last: str, stored: Tensor, model: nn.Module) -> bool:
    """Whether a stored buffer holds the values that the model computes; `last` is the last part of its name."""
    if last == ANGLES:
        angles = [buffer for name, buffer in model.named_buffers() if name.endswith(ANGLES)]
        angles += [1 / base ** (torch.arange(stored.numel()) / stored.numel()) for base in _bases(model)]
        return any(
            own.shape == stored.shape and torch.allclose(own.float(), stored.float(), rtol=MOST_DIFFERENCE, atol=0)
            for own in angles
        )
    if last in POSITIONS:
        return torch.equal(stored.flatten().long(), torch.arange(stored.numel()))
    if last in MASKED:
        return stored.numel() == 1 and float(stored) <= -LEAST_MASKED
    triangle = torch.ones_like(stored, dtype=torch.bool).tril() if stored.ndim == MASK_DIMENSIONS else None
    return triangle is not None and torch.equal(stored.bool(), triangle)


def _bases(model: nn.Module) -> list[float]:
    """Return the base of RoPE for each kind of layer. Stored angles are computed from the base, without any scaling."""
    rope = getattr(getattr(model, "config", None), "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)] or [rope]
    return [float(parameters["rope_theta"]) for parameters in nested if "rope_theta" in parameters]
