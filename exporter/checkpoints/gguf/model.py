"""The reader that makes a model of transformers from a GGUF file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from sharp.core.errors import InputError
from sharp.core.manifest import SamplingDefaults
from sharp.exporter.checkpoints.gguf.config import read_settings
from sharp.exporter.checkpoints.gguf.file import GgufFile
from sharp.exporter.checkpoints.gguf.tokenizer import read_tokenizer
from sharp.exporter.checkpoints.gguf.weights import read_weights, weight_names
from sharp.models.config import MOST_LAYERS

# llama.cpp's name of a sampling parameter -> Sharp's name.
SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


@dataclass(frozen=True)
class GgufCheckpoint:
    """A model of transformers made from a GGUF file, in float32, with its tokenizer and its sampling defaults."""

    file: GgufFile
    model: PreTrainedModel
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerFast | None
    sampling: SamplingDefaults
    warnings: tuple[str, ...]


def read_gguf(path: Path) -> GgufCheckpoint:
    """Read a GGUF file as a model of transformers.

    Raises:
        InputError: the file is incomplete, or has an architecture or a tokenizer that is not supported.
        Exception: the file is damaged; the libraries `gguf`, `tokenizers` and transformers raise errors of several
            classes.
    """
    file = GgufFile(path)
    layers = file.integer("block_count", 1)
    if not 1 <= layers <= MOST_LAYERS:
        raise InputError(f"{path} says that it has {layers} layers, but must have from 1 to {MOST_LAYERS}")
    architecture, settings = read_settings(file)
    read = read_tokenizer(file)
    tokens: dict[str, Any] = {
        "bos_token_id": read.special.bos,
        "eos_token_id": list(read.special.ends),
        "pad_token_id": read.special.padding,
    }
    model_type = settings.pop("model_type")
    config = CONFIG_MAPPING[model_type](**settings, **tokens)
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with torch.device("meta"):
        skeleton = model_class(config)
    sources = weight_names(file, architecture, skeleton)
    described = sum(weights.numel() for name, weights in skeleton.state_dict().items() if sources[name])
    if described > (stored := file.elements()):
        raise InputError(
            f"{path} is incomplete: its header describes {described:,} weights, and it holds {stored:,}; copy it again"
        )
    state = read_weights(file, architecture, skeleton, sources)
    model, loading = model_class.from_pretrained(
        None, config=config, state_dict=state, dtype="float32", output_loading_info=True
    )
    for problem in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if loading[problem]:
            raise InputError(
                f"{path} cannot be read: the weights of {sorted(map(str, loading[problem]))[0]} do not fit its "
                "architecture; convert it again"
            )
    return GgufCheckpoint(file, model, config, read.tokenizer, _sampling(file), read.warnings)


def _sampling(file: GgufFile) -> SamplingDefaults:
    """Return the sampling defaults that the file recommends; those that it does not name are Sharp's.

    Raises:
        InputError: a value is out of its range.
    """
    found = {name: file.value(f"general.sampling.{key}") for key, name in SAMPLING.items()}
    # The file has float32. Its shortest decimal form is 0.95, while Python's float would show 0.949999988079071.
    shortest = {
        name: float(str(np.float32(value))) if isinstance(value, float) else value for name, value in found.items()
    }
    try:
        return SamplingDefaults.model_validate({name: value for name, value in shortest.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(f"{file.path}: general.sampling ({first['loc'][0]}): {first['msg']}") from error
