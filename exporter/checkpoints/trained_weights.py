"""The weights that `--trained-norm` names, put into the attention modules as parameters of their norm."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from sharp.core.errors import InputError
from sharp.exporter.checkpoints.trained_norm import TRANSFORMS, TrainedNorm, Weights
from sharp.models.adapted_model import VERSION, AdaptedNorm, AttentionNorm, attach, attention_norms, find_attention
from sharp.models.norms import get_norm
from sharp.models.ssa_parameters import SsaValues
from sharp.models.temperature_preset import AdaptiveTemperature, read_temperature

# The beginning of the name of a norm's input -> the name that `AttentionNorm` has for it.
MODULES = {"beta.": "w_beta.", "gamma.": "w_gamma."}


def attach_trained_norm(
    path: Path, model: PreTrainedModel, q_heads: int, given: TrainedNorm, unused: tuple[str, ...]
) -> tuple[AdaptedNorm, tuple[str, ...]]:
    """Give the attention modules of `model`, read from `path`, the norm that the model was trained with, in place.

    `unused` has the names of weights in the checkpoint that the model has no place for.

    Returns:
        The description of the norm, and those of the `unused` weights that the norm does not use.

    Raises:
        NotFoundError: the file of temperature coefficients does not exist.
        InputError: the description of the norm does not fit the model, or names weights that `path` does not have.
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
    return described, left


def named_weights(given: TrainedNorm) -> dict[str, Weights]:
    """Return the parameters that are weights of the checkpoint and not numbers, by the name of the parameter."""
    return {
        name: Weights(name=value) if isinstance(value, str) else value
        for name, value in given.parameters.items()
        if not isinstance(value, float | list)
    }


def described_norm(
    given: TrainedNorm, modules: tuple[str, ...], q_heads: int, hidden_size: int, context: int, scaled: int | None
) -> AdaptedNorm:
    """Return the description that `AttentionNorm` takes. The last `scaled` heads have a length scale (None: all).

    `modules` are the names of the attention modules in the order of the layers, `context` is the trained context.

    Raises:
        NotFoundError: the file of temperature coefficients does not exist.
        InputError: the file of temperature coefficients is not valid.
    """
    options: dict[str, Any] = {}
    if given.temperature_coefficients is not None:
        chosen = given.temperature_coefficients
        preset = read_temperature(chosen) if isinstance(chosen, str) else AdaptiveTemperature(tuple(chosen))
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
    """Return the values of the norm's inputs by name for every layer, float32 and with their transform applied.

    Weights are read from the safetensors files of folder `path`.
    If `path` is a GGUF file, parameters can only be numbers.

    Raises:
        InputError: the folder does not have a weight that `given` names, or a list is not as long as the model is deep.
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
    """Return the number of heads that the values of a length scale are for; None if it is all, or not known."""
    counts = {
        value.shape[0] if name.endswith(".weight") else value.numel()
        for name, value in parameters.items()
        if value.numel() > 1
    }
    return next(iter(counts)) if len(counts) == 1 and next(iter(counts)) < q_heads else None


@torch.no_grad()
def fill(norm: AttentionNorm, values: Mapping[str, Tensor], where: str) -> None:
    """Set the learned parameters of a layer's norm in place; `where` is the checkpoint for messages.

    A value of one number stands for all heads. `values` of ssa must have b and n.

    Raises:
        InputError: a value has another shape, is not finite, or is out of range.
    """
    for name, value in values.items():
        if not value.isfinite().all():
            raise InputError(
                f"{where}: parameter {name!r} of the trained norm is not finite; train or save the model again"
            )
    heads = norm.described.q_heads
    if norm.described.norm == "ssa":
        b, n = (_fitted(values[name].reshape(-1), (heads,), name, where) for name in ("b", "n"))
        if not (b > 0).all() or not (n > 0).all():
            raise InputError(f"{where}: ssa has b and n above 0, but here b {b.min():g}, n {n.min():g}")
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
    """Return a learned parameter in `shape`; a single number is expanded. InputError for any other shape.

    `where` begins the message, and `name` is the parameter in it.
    """
    if value.numel() == 1:
        return value.reshape(()).expand(shape)
    if tuple(value.shape) != shape:
        raise InputError(
            f"{where}: parameter {name!r} of the trained norm has shape {list(value.shape)}, but must have "
            f"{list(shape)}"
        )
    return value
