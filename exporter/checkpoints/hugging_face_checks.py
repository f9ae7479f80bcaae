"""Checks of a Hugging Face folder before transformers reads it, and of any model of transformers."""

import math
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from sharp.core.errors import InputError
from sharp.exporter.checkpoints.architectures import ARCHITECTURES, ATTENTION_LAYERS, ROPE_TYPES, Architecture
from sharp.exporter.sources.decoder import Decoder
from sharp.exporter.sources.uncached_model import UncachedDecoder, UncachedModel
from sharp.models.attention import EagerAttention
from sharp.models.checkpoint_files import shard_names
from sharp.models.config import MOST_LAYERS
from sharp.models.safetensors_header import check_header

PROBED_TOKENS = 24
MOST_TENSORS = 100_000  # in all files together
MOST_DIFFERENCE = 1e-3  # relative: other attention changes logits by far more, rounding by far less


@torch.no_grad()
def check_own_attention(path: Path, original: Decoder | UncachedModel) -> None:
    """Refuse a model whose logits change when its attention goes through the hook, for example a bidirectional decoder.

    `original` has the norm that the checkpoint was trained with. Verification of an export under another norm would not
    notice such a model, because transformers' own attention has softmax only.

    Raises:
        InputError: the outputs differ by more than 0.001 of the largest.
    """
    model = UncachedDecoder(original) if isinstance(original, Decoder) else original
    inputs = model.random_inputs(1, min(PROBED_TOKENS, model.config.max_context), torch.Generator().manual_seed(0))
    own = model.own_output(*inputs)
    assert own is not None  # transformers' code has softmax, and the trained norm of an adapted model
    attention = EagerAttention(model.config, attention_mask=model.attention_mask(*inputs))
    error = (model.compute(attention, *inputs) - own).abs().max() / own.abs().max()
    if not error <= MOST_DIFFERENCE:
        sides = "to both sides" if model.kind == "encoder" else "backwards"
        raise InputError(
            f"{path} cannot be exported: with softmax attention that looks {sides} its logits differ from "
            f"transformers' own by {error:.0e} of the largest, so it attends in another way"
        )


def check_shards(path: Path) -> None:
    """Refuse an index that names weights outside the folder, and safetensors files with damaged headers.

    Links are allowed, because transformers' own cache has them.

    Raises:
        InputError: an index or a header is damaged, an index names a file outside, or there are too many tensors.
    """
    for index in path.glob("*.safetensors.index.json"):  # if `path` is a file, glob finds nothing
        shard_names(index)
    tensors = sum(check_header(shard) for shard in path.glob("*.safetensors"))
    if tensors > MOST_TENSORS:
        raise InputError(f"{path} has {tensors} tensors in its files; the limit is {MOST_TENSORS}")


def check_size(path: Path, loader: Any, facts: PreTrainedConfig, making: Mapping[str, Any]) -> None:
    """Refuse a configuration that describes more weights than the files hold, before the model takes memory.

    `loader` is a class of transformers with `from_config`, and `making` has further arguments for the constructor of
    the model.

    Raises:
        InputError: the folder has no safetensors files, or they hold fewer weights.
    """
    with torch.device("meta"):
        described_size = sum(parameter.numel() for parameter in loader.from_config(facts, **making).parameters())
    stored = 0
    shards = list(path.glob("*.safetensors"))
    if not shards:
        raise InputError(f"{path} has no .safetensors files; save the model in them with transformers first")
    for shard in shards:
        with safe_open(shard, framework="pt") as file:
            names = file.keys()
            stored += sum(_numbers(name, file.get_slice(name).get_shape()) for name in names)
    if described_size > stored:
        raise InputError(
            f"{path} is incomplete: its config.json describes {described_size:,} weights, and its safetensors "
            f"files hold {stored:,}; copy the checkpoint again, or correct config.json"
        )


def _numbers(name: str, shape: list[int]) -> int:
    """Return the number of weights in a tensor. MXFP4 has two in each byte of `*_blocks`, and none in `*_scales`."""
    if name.endswith("_scales"):
        return 0
    return math.prod(shape) * (2 if name.endswith("_blocks") else 1)


def check_finite(path: Path, model: PreTrainedModel) -> None:
    """Refuse weights that are NaN or infinite.

    Raises:
        InputError: there is such a weight in `model`, which was read from `path`.
    """
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise InputError(f"{path}: the weights of {name} are not all finite; copy the checkpoint again")


def reason(error: Exception) -> str:
    """Return the beginning of a library's error message, which may be a page long, in one line."""
    return textwrap.shorten(str(error).strip() or type(error).__name__, 200, placeholder=" ...")


def find_architecture(path: Path, facts: PreTrainedConfig) -> Architecture:
    """Return the supported architecture that a configuration describes.

    Raises:
        InputError: the architecture, its RoPE or its quantization is not supported, it has too many layers, or layers
            that are no attention.
    """
    layer_types = [str(kind) for kind in getattr(facts, "layer_types", None) or ()]
    others = [kind for kind in layer_types if kind not in ATTENTION_LAYERS]
    # transformers calls the layers of models such as Mamba, which have no attention at all, linear_attention.
    recurrent = facts.model_type not in ARCHITECTURES and {*layer_types} == {"linear_attention"}
    if others and not recurrent:
        raise InputError(
            f"{path} cannot be exported: {len(others)} of its {len(layer_types)} layers are {others[0]}, and Sharp "
            "exports models whose layers are all full or sliding-window attention; sharp-export --list has them"
        )
    if facts.model_type not in ARCHITECTURES:
        raise InputError(
            f"{path} is a {facts.model_type} model, which Sharp does not support yet; "
            "sharp-export --list has those that it does"
        )
    quantized = path.is_dir() and quantization_of(facts)
    if quantized and (quantized, facts.model_type) != ("mxfp4", "gpt_oss"):
        raise InputError(f"{path} is quantized; export the model that it was made from, with --quantize int8 or int4")
    if not 1 <= facts.num_hidden_layers <= MOST_LAYERS:
        raise InputError(
            f"{path} says that it has {facts.num_hidden_layers} layers, but must have from 1 to {MOST_LAYERS}; "
            "copy the checkpoint again"
        )
    for rope_type in _rope_types(getattr(facts, "rope_parameters", None) or {}):
        if rope_type not in ROPE_TYPES and not (rope_type == "longrope" and _has_one_longrope(facts)):
            raise InputError(
                f"{path} has RoPE of type {rope_type}, and Sharp has default, linear, llama3, proportional and yarn, "
                "whose angles do not change with the length (longrope, too, in models no longer than its original "
                "length); export a checkpoint with one of these"
            )
    return ARCHITECTURES[facts.model_type]


def _has_one_longrope(facts: PreTrainedConfig) -> bool:
    """Whether the angles of Phi-3's RoPE are the same for all sequence lengths that the model supports."""
    parameters = facts.rope_parameters
    original = parameters.get("original_max_position_embeddings") or 0
    return bool(
        parameters.get("short_factor") == parameters.get("long_factor") or facts.max_position_embeddings <= original
    )


def fix_longrope(model: PreTrainedModel) -> None:
    """Make `model` keep the initial angles of Phi-3's RoPE, which transformers would choose anew by each length."""
    for module in model.modules():
        if getattr(module, "rope_type", None) == "longrope":
            module.rope_type = "default"  # type: ignore[assignment]


def fix_mrope(model: PreTrainedModel) -> None:
    """Make `model` rotate each token by one position, as text needs; Qwen3.5 has three per token, for images.

    torch.onnx writes a model that ONNX Runtime refuses for the assignment that takes channels of all three.
    """
    for module in model.modules():
        if hasattr(module, "recomposition_frequencies"):
            module.recomposition_frequencies = _frequencies_of_text  # type: ignore[assignment] # a method


def _frequencies_of_text(angles: Tensor) -> Tensor:
    """Return the first of three equal tensors in `angles` [3, batch, tokens, channels], twice along the channels."""
    return torch.cat((angles[0], angles[0]), dim=-1)


def quantization_of(facts: PreTrainedConfig) -> str | None:
    """Return how the weights of a folder are quantized, such as "mxfp4" for gpt-oss; None if they are not quantized."""
    described = getattr(facts, "quantization_config", None)
    if described is None:
        return None
    return str(described.get("quant_method") if isinstance(described, dict) else described)


def _rope_types(parameters: dict[str, Any]) -> set[str]:
    """Return the types of RoPE in `rope_parameters`, which has a dictionary per kind of layer in some models."""
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {str(rope.get("rope_type", "default")) for rope in nested or [parameters]}
