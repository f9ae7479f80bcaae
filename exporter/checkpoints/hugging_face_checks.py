"""What is checked of a Hugging Face folder or GGUF file before and after transformers reads it."""

import json
import math
import os
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors import safe_open
from transformers import PreTrainedConfig

from sharp.exporter.checkpoints.architectures import ARCHITECTURES, ROPE_TYPES, Architecture
from sharp.exporter.checkpoints.decoder import Decoder
from sharp.exporter.checkpoints.uncached_model import UncachedDecoder, UncachedModel
from sharp.models.attention import EagerAttention
from sharp.models.config import MOST_LAYERS
from sharp.models.safetensors_header import check_header
from sharp.plugins.errors import InputError

PROBED_TOKENS = 24
MOST_TENSORS = 100_000  # of all files
MOST_DIFFERENCE = 1e-2  # another attention moves logits by far more, rounding by far less


@torch.no_grad()
def check_own_attention(path: Path, original: Decoder | UncachedModel) -> None:
    """Refuse a model whose attention is not what the hook makes of it: of another direction, say.

    Verification under another norm would not show it, as transformers has only softmax to compare with.
    """
    model = UncachedDecoder(original) if isinstance(original, Decoder) else original
    inputs = model.random_inputs(1, min(PROBED_TOKENS, model.config.max_context), torch.Generator().manual_seed(0))
    own = model.own_output(*inputs)
    assert own is not None  # of softmax, which transformers has
    attention = EagerAttention(model.config, attention_mask=model.attention_mask(*inputs))
    error = (model.compute(attention, *inputs) - own).abs().max() / own.abs().max()
    if not error <= MOST_DIFFERENCE:
        sides = "to both sides" if model.kind == "encoder" else "backwards"
        raise InputError(
            f"{path} cannot be exported: with softmax attention that looks {sides} its logits differ from "
            f"transformers' own by {error:.0e} of the largest, so it attends in another way"
        )


def check_shards(path: Path) -> None:
    """Refuse an index that names weights outside the folder; links are allowed, transformers' own cache has them."""
    for index in path.glob("*.safetensors.index.json"):  # none in a file
        try:
            shards = set(json.loads(index.read_bytes())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(f"{index} is damaged: it has no weight_map; copy or save the checkpoint again") from error
        for shard in shards:
            if not isinstance(shard, str) or Path(shard).name != shard:
                raise InputError(f"{index} keeps weights in {shard!r}, which is not in the folder; do not use it")
    tensors = sum(check_header(shard) for shard in path.glob("*.safetensors"))
    if tensors > MOST_TENSORS:
        raise InputError(f"{path} has {tensors} tensors in its files; the limit is {MOST_TENSORS}")


def check_size(path: Path, loader: Any, facts: PreTrainedConfig, making: Mapping[str, Any]) -> None:
    """Refuse a configuration of a larger model than the weights are of, before memory is taken for it.

    `making` are further arguments of the model.
    """
    with torch.device("meta"):
        described_size = sum(parameter.numel() for parameter in loader.from_config(facts, **making).parameters())
    if path.is_file():
        described, holders = "its header", "it holds"
        # int, as numpy's sums are of 64 bits; and named as transformers names it, for `one_reader`.
        tensors = gguf.GGUFReader(os.path.join(path.parent, path.name)).tensors  # noqa: PTH118
        stored = sum(int(tensor.n_elements) for tensor in tensors)
    else:
        described, holders = "its config.json", "its safetensors files hold"
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
            f"{path} is incomplete: {described} describes {described_size:,} weights, and {holders} {stored:,}"
        )


def _numbers(name: str, shape: list[int]) -> int:
    """Of a tensor in a file; those of MXFP4 are in pairs, with a scale for each 32."""
    if name.endswith("_scales"):
        return 0
    return math.prod(shape) * (2 if name.endswith("_blocks") else 1)


def reason(error: Exception) -> str:
    """The beginning of what a library says, which may be a page, in one line."""
    return textwrap.shorten(str(error).strip() or type(error).__name__, 200, placeholder=" ...")


def find_architecture(path: Path, facts: PreTrainedConfig) -> Architecture:
    """The supported architecture that a configuration describes.

    Raises:
        InputError: it is none, or has what Sharp does not support.
    """
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
        if rope_type not in ROPE_TYPES:
            raise InputError(
                f"{path} uses RoPE of type {rope_type}, whose angles change with the length; "
                f"supported are: {', '.join(ROPE_TYPES)}"
            )
    return ARCHITECTURES[facts.model_type]


def quantization_of(facts: PreTrainedConfig) -> str | None:
    """How the weights of a folder are quantized: "mxfp4" is what gpt-oss is published in; None: not at all."""
    described = getattr(facts, "quantization_config", None)
    if described is None:
        return None
    return str(described.get("quant_method") if isinstance(described, dict) else described)


def _rope_types(parameters: dict[str, Any]) -> set[str]:
    """The types in `rope_parameters`, which some models have one of for every kind of layer."""
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {str(one.get("rope_type", "default")) for one in nested or [parameters]}
