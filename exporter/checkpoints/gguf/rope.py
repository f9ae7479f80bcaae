"""RoPE of a GGUF file as llama.cpp applies it, translated into transformers' `rope_parameters`.

The angle of pair i at position p is p · base^(-2i/d) / (factor · factors_i), where `factors` is a tensor that files of
Llama 3.1 and Phi-3 have. cos and sin are multiplied by an attention factor. YaRN blends the scaled angles with the
unscaled ones (arXiv 2309.00071). RoPE that no type of transformers describes gets the type `frequency_factors`, which
this module adds to transformers.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from sharp.core.errors import InputError
from sharp.exporter.checkpoints.gguf.file import GgufFile

OWN_TYPE = "frequency_factors"
FREQUENCIES, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
# The lengths of pre-training with which Llama 3.1's scaling is tried. All published models have 8192.
LLAMA3_LENGTHS = (8192,)


def rope_parameters(
    file: GgufFile, dimensions: int, *, with_factors: bool = False, truncate: bool = True
) -> dict[str, Any]:
    """Return transformers' `rope_parameters` for a file. The first `dimensions` of each head are rotated.

    `with_factors` is for architectures for which llama.cpp reads the tensors of factors. Without `truncate`, YaRN's
    ramp may begin and end between two pairs.

    Raises:
        InputError: the scaling is of an unknown kind, or changes with the length of the sequence.
    """
    kind = file.text(file.own_key("rope.scaling.type"), "linear")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise file.bad(file.own_key("rope.scaling.type"), "none, linear, yarn or longrope", kind)
    factor = file.number("rope.scaling.factor", file.number("rope.scale_linear", 0.0)) or 1.0
    theta = file.number("rope.freq_base", 10000.0)
    length = file.integer("context_length")
    original = file.integer("rope.scaling.original_context_length", length)
    attention = file.number("rope.scaling.attn_factor", 1.0)
    factors = _frequency_factors(file, dimensions // 2, original) if with_factors else None
    if kind == "none":
        factor = 1.0
    if kind == "yarn":
        if factors is not None:
            raise file.bad(file.own_key("rope.scaling.type"), "another type beside a tensor of factors", kind)
        return {"rope_type": "yarn", "rope_theta": theta, **_yarn(file, factor, attention, original, truncate)}
    if factors is None and attention == 1.0:
        plain = {"rope_type": "default"} if factor == 1.0 else {"rope_type": "linear", "factor": factor}
        return {**plain, "rope_theta": theta}
    factors = np.ones(dimensions // 2, np.float32) if factors is None else factors
    if (
        factor == attention == 1.0
        and file.has_tensor(FREQUENCIES)
        and (llama3 := _llama3(factors, theta, {*LLAMA3_LENGTHS, original})) is not None
    ):
        return llama3
    return {
        "rope_type": OWN_TYPE,
        "rope_theta": theta,
        "factors": (factors * factor).tolist(),
        "attention_factor": attention,
    }


def _yarn(file: GgufFile, factor: float, attention: float, original: int, truncate: bool) -> dict[str, Any]:
    """Return transformers' RoPE parameters for YaRN.

    `factor` is the scale of the context, `original` the context in tokens before scaling, and `attention` a factor of
    cos and sin on top of the file's.

    Raises:
        InputError: the file extrapolates by a factor other than 1.
    """
    if (extrapolation := file.number("rope.scaling.yarn_ext_factor", 1.0)) not in (1.0, -1.0):  # -1: not set
        raise file.bad(file.own_key("rope.scaling.yarn_ext_factor"), "1 only", extrapolation)
    # llama.cpp's converter writes the whole factor of cos and sin into this key, as transformers defines it.
    whole = file.number("rope.scaling.yarn_attn_factor", 0.0) or 1.0 + (
        0.1 * float(np.log(factor)) if factor > 1 else 0
    )
    return {
        "factor": factor,
        "original_max_position_embeddings": original,
        "attention_factor": whole * attention,
        "beta_fast": file.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": file.number("rope.scaling.yarn_beta_slow", 1.0),
        "truncate": truncate,
    }


def _frequency_factors(file: GgufFile, pairs: int, original: int) -> NDArray[np.float32] | None:
    """Return the factors of all pairs from the file's tensors; None if it has no such tensor.

    `pairs` is the number of rotated pairs of a head, and `original` the context in tokens before it was scaled.

    Raises:
        InputError: the factors are not positive or not one for each pair, or they change with the length.
    """
    names = [name for name in (FREQUENCIES, SHORT, LONG) if file.has_tensor(name)]
    found = {name: file.tensor(name).reshape(-1) for name in names}
    for name, factors in found.items():
        if factors.shape != (pairs,) or not np.isfinite(factors).all() or not (factors > 0).all():
            raise InputError(
                f"{file.path}: {name} must have {pairs} positive numbers, one for each pair that is rotated"
            )
    if FREQUENCIES in found:
        return found[FREQUENCIES]
    if SHORT in found and LONG in found and not np.array_equal(found[SHORT], found[LONG]):
        length = file.integer("context_length")
        if length > original:
            key = file.own_key("context_length")
            raise InputError(
                f"{file.path} rotates by other angles in sequences of more than {original} tokens ({SHORT}, {LONG}), "
                f"and Sharp's angles do not change with the length; limit the model to {original} tokens first: "
                f"gguf-set-metadata {file.path} {key} {original}"
            )
    return found.get(SHORT, found.get(LONG))


def _llama3(factors: NDArray[np.float32], theta: float, lengths: set[int]) -> dict[str, Any] | None:
    """Return Llama 3.1's scaling if it gives exactly these factors, else None; the file does not have its parameters.

    `theta` is the base of RoPE, and `lengths` are the trained lengths to try.
    """
    wavelengths = 2 * np.pi * theta ** (np.arange(len(factors)) / len(factors))
    largest = float(factors.max())
    for length in sorted(lengths):
        blend = (length / wavelengths - 1.0) / (4.0 - 1.0)
        smooth = 1 / ((1 - blend) / largest + blend)
        expected = np.where(wavelengths < length / 4, 1.0, np.where(wavelengths > length, largest, smooth))
        if largest > 1 and np.allclose(factors, expected, rtol=1e-5):
            bounds = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": length}
            return {"rope_type": "llama3", "rope_theta": theta, "factor": largest, **bounds}
    return None


def _own_frequencies(
    config: PreTrainedConfig, device: Any = None, _seq_len: int | None = None, layer_type: str | None = None
) -> tuple[torch.Tensor, float]:
    """Return the angle per position of each pair, and the factor of cos and sin, for transformers' RoPE modules."""
    parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    factors = torch.tensor(parameters["factors"], dtype=torch.float32, device=device)
    exponents = torch.arange(len(factors), dtype=torch.float32, device=device) / len(factors)
    return 1.0 / (parameters["rope_theta"] ** exponents) / factors, parameters["attention_factor"]


ROPE_INIT_FUNCTIONS[OWN_TYPE] = _own_frequencies
