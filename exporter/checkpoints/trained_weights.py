"""The weights that `--trained-norm` names, as the parameters of the norm of every attention module."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from sharp.exporter.checkpoints.trained_norm import TRANSFORMS, TrainedNorm, Weights
from sharp.models.adapted_model import VERSION, AdaptedNorm, AttentionNorm, attach, attention_norms, find_attention
from sharp.models.norms import SsaValues, get_norm
from sharp.models.temperature_preset import read_temperature
from sharp.plugins.errors import InputError

# What `AttentionNorm` calls the inputs of norms.
MODULES = {"beta.": "w_beta.", "gamma.": "w_gamma."}
# Weights that other versions of transformers keep beside attention, which it makes itself.
BUFFERS = ("*.attn.bias", "*.attn.masked_bias", "*.attention.bias", "*.attention.masked_bias", "*inv_freq")
WORDS = ("ssa", "ssmax", "entmax", "sparsemax", "softpick", "attn_scale", "temperature", "sink", "alibi", "slope")


def attach_trained_norm(
    path: Path, model: PreTrainedModel, q_heads: int, given: TrainedNorm, unused: tuple[str, ...]
) -> tuple[AdaptedNorm, tuple[str, ...]]:
    """Give the attention modules of `model`, read from `path`, the norm that it was trained with.

    Returns its description, and what is left of the `unused` weights.

    Raises:
        InputError: what is said of the norm does not fit the model.
    """
    modules = find_attention(model)
    values = read_parameters(given, path, len(modules))
    facts = model.config
    scaled = given.scaled_heads or (scaled_heads(values[0], q_heads) if values else None)
    described = described_norm(given, modules, q_heads, facts.hidden_size, facts.max_position_embeddings, scaled)
    attach(model, described)
    for norm, own in zip(attention_norms(model), values, strict=True):
        fill(norm, own, str(path))
    named = [weights.name for weights in named_weights(given).values()]
    used = {name.replace("{layer}", str(layer)) for name in named for layer in range(len(modules))}
    left = tuple(name for name in unused if name not in used)
    if names := look_like_a_norm(left, modules, given.ignore):
        raise InputError(
            f"{path} has weights that the trained norm {given.norm} does not name and that look like those of a norm "
            f"({len(names)}, the first is {names[0]}); name them, or list them under ignore"
        )
    return described, left


def named_weights(given: TrainedNorm) -> dict[str, Weights]:
    """The parameters that are weights and not numbers."""
    return {
        name: Weights(name=value) if isinstance(value, str) else value
        for name, value in given.parameters.items()
        if not isinstance(value, float | list)
    }


def described_norm(
    given: TrainedNorm, modules: tuple[str, ...], q_heads: int, hidden_size: int, context: int, scaled: int | None
) -> AdaptedNorm:
    """What `AttentionNorm` takes; the last `scaled` heads have a length scale, None is all."""
    options: dict[str, Any] = {}
    if given.temperature_coefficients is not None:
        preset = read_temperature(given.temperature_coefficients)
        options = {"temperature_coefficients": preset.coefficients, "entropy_threshold": preset.entropy_threshold}
    return AdaptedNorm(
        given.norm,
        modules,
        q_heads=q_heads,
        hidden_size=hidden_size,
        trained_context=context,
        alpha=get_norm(given.norm).alpha if given.alpha is None else given.alpha,
        gamma=given.gamma,
        positions=given.positions,
        softcap=given.softcap,
        scale=given.scale,
        scaled_heads=scaled,
        length_onset=given.length_onset,
        version=VERSION,
        **options,
    )


def read_parameters(given: TrainedNorm, path: Path, layers: int) -> list[dict[str, Tensor]]:
    """The values of the norm's inputs in every layer, float32, from the safetensors files of the folder `path`.

    A GGUF file has none that could be named.

    Raises:
        InputError: a name is not there.
    """
    named = named_weights(given)
    names = {
        (name, layer): value.name.replace("{layer}", str(layer))
        for name, value in named.items()
        for layer in range(layers)
    }
    found: dict[str, Tensor] = {}
    for shard in sorted(path.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as file:
            for name in set(names.values()) & set(file.keys()):
                found[name] = file.get_tensor(name).float()
    missing = next((name for name in names.values() if name not in found), None)
    if missing is not None:
        raise InputError(
            f"the trained norm names the weights {missing!r}, which {path} does not have; correct the name"
        )
    made: list[dict[str, Tensor]] = []
    for layer in range(layers):
        values: dict[str, Tensor] = {}
        for name, number in given.parameters.items():
            if isinstance(number, list) and len(number) != layers:
                raise InputError(
                    f"the trained norm's {name} has {len(number)} lists, but the model has {layers} layers; "
                    "give a list of numbers for every layer"
                )
            if isinstance(number, float | list):
                values[name] = torch.tensor(number if isinstance(number, float) else number[layer])
        for name, value in named.items():
            values[name] = TRANSFORMS[value.transform](found[names[name, layer]])
        made.append(values)
    return made


def scaled_heads(parameters: Mapping[str, Tensor], q_heads: int) -> int | None:
    """How many heads the values of a length scale are of; None where they do not say."""
    counts = {
        value.shape[0] if name.endswith(".weight") else value.numel()
        for name, value in parameters.items()
        if value.numel() > 1
    }
    return next(iter(counts)) if len(counts) == 1 and next(iter(counts)) < q_heads else None


@torch.no_grad()
def fill(norm: AttentionNorm, values: Mapping[str, Tensor], where: str) -> None:
    """Set what a layer's norm has learned.

    Raises:
        InputError: a value is of another shape, is not finite, or is out of its range.
    """
    for name, value in values.items():
        if not value.isfinite().all():
            raise InputError(f"{where}: parameter {name!r} of the trained norm is not finite")
    heads = norm.described.q_heads
    if norm.described.norm == "ssa":
        b, n = (_fitted(values[name].reshape(-1), (heads,), name, where) for name in ("b", "n"))
        if not (b > 0).all() or not (n >= 1).all():
            raise InputError(f"{where}: ssa has b above 0 and n of at least 1, but here b {b.min():g}, n {n.min():g}")
        norm.head_parameters = SsaValues(torch.stack([b, n], dim=-1))
        return
    if norm.query_scale is None:
        return
    own = dict(norm.query_scale.named_parameters())
    for name, value in values.items():
        target = name
        for ours, theirs in MODULES.items():
            target = target.replace(ours, theirs)
        parameter = own["gamma_exponent" if target == "gamma" else target]
        flat = value.reshape(-1) if parameter.ndim == 1 else value
        parameter.copy_(_fitted(flat, tuple(parameter.shape), name, where))


def _fitted(value: Tensor, shape: tuple[int, ...], name: str, where: str) -> Tensor:
    if value.numel() == 1:
        return value.reshape(()).expand(shape)
    if tuple(value.shape) != shape:
        raise InputError(
            f"{where}: parameter {name!r} of the trained norm has shape {list(value.shape)}, but must have "
            f"{list(shape)}"
        )
    return value


def look_like_a_norm(unused: tuple[str, ...], attention: tuple[str, ...], ignore: list[str]) -> list[str]:
    """Of the weights that a model has no place for, those that its attention's norm may have learned."""
    return [
        name
        for name in unused
        if not any(fnmatchcase(name, pattern) for pattern in (*BUFFERS, *ignore))
        and (
            any(f"{module}." in name for module in attention)
            or any(word in part for word in WORDS for part in name.lower().split("."))
        )
    ]
