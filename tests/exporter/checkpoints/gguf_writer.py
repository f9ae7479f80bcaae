"""Write GGUF files of random models of transformers, in the form that llama.cpp's convert_hf_to_gguf.py writes."""

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from tests.exporter.tiny_hugging_face import tiny

LAYER = re.compile(r"\.(?:layers|h)\.(\d+)\.")
PAIRED = ("llama", "granite", "smollm3")
KEYS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
    "n_inner": "feed_forward_length",
    "intermediate_size": "feed_forward_length",
    "vocab_size": "vocab_size",
}


@dataclass(frozen=True)
class Tokens:
    """A vocabulary and its flags, as keys of `tokenizer.ggml`. With `kind` "no_vocab" the file has none."""

    kind: str = "no_vocab"
    texts: Sequence[str] = ()
    keys: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A tiny model: `model_type` of transformers with `changes`, written as `architecture` with `keys` of llama.cpp."""

    architecture: str
    model_type: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)

    def model(self) -> PreTrainedModel:
        """Return the model of the file. Each weight depends on its name and shape only."""
        model = tiny(self.model_type, **self.changes)
        with torch.no_grad():
            for name, weights in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
                if name in model.state_dict():
                    random = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(weights.shape, np.float32)
                    weights.copy_(torch.from_numpy(0.2 * random + ("norm" in name)))
        return model

    def write(self, path: Path, tokens: Tokens = Tokens(), model: PreTrainedModel | None = None) -> Path:
        """Write the GGUF file, and return its path."""
        model = self.model() if model is None else model
        writer = gguf.GGUFWriter(path, self.architecture)
        config = model.config
        for name, key in KEYS.items():
            if (value := getattr(config, name, None)) is not None:
                add(writer, f"{self.architecture}.{key}", value)
        for key, value in self.keys.items():
            add(writer, f"{self.architecture}.{key}", value)
        add(writer, "tokenizer.ggml.model", tokens.kind)
        if tokens.texts:
            writer.add_token_list(list(tokens.texts))
        for key, value in tokens.keys.items():
            add(writer, key if key.startswith(("tokenizer.", "general.")) else f"tokenizer.ggml.{key}", value)
        for name, weights in {**converted(model, self.architecture), **self.tensors}.items():
            writer.add_tensor(name, np.ascontiguousarray(weights, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add a key with the type that llama.cpp expects for the value."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, list(value))


def converted(model: PreTrainedModel, architecture: str) -> dict[str, NDArray[np.float32]]:
    """Return the tensors that the GGUF file of `model` has."""
    identifier = next(one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(identifier, model.config.num_hidden_layers)
    tensors: dict[str, NDArray[np.float32]] = {}
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        weights = parameter.detach().numpy()
        layer = LAYER.search(name)
        if ".experts." in name and layer is not None:
            tensors |= experts(f"blk.{layer[1]}.", name, weights, architecture)
            continue
        if name.endswith("e_score_correction_bias") and layer is not None:
            tensors[f"blk.{layer[1]}.exp_probs_b.bias"] = weights
            continue
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        if not found.endswith((".weight", ".bias")):  # names of gpt-oss's sinks have no suffix
            found += ".weight"
        if architecture in PAIRED and (part := re.search(r"\.([qk])_proj\.", name)):
            config = model.config
            heads = config.num_attention_heads if part[1] == "q" else config.num_key_value_heads
            half = weights.shape[0] // heads // 2
            weights = weights.reshape(heads, 2, half, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            weights = weights + 1
        if architecture == "gpt2" and re.search(r"\.c_(attn|proj|fc)\.weight$", name):
            weights = weights.T
        tensors[found] = weights.reshape(-1) if found.endswith("ffn_gate_inp_shexp.weight") else weights
    return tensors


def experts(prefix: str, name: str, weights: NDArray[np.float32], architecture: str) -> dict[str, NDArray[np.float32]]:
    """Return the tensors of a layer's experts.

    Gate and up become two tensors. In gpt-oss they are interleaved and transposed.
    """
    kind = "bias" if name.endswith("_bias") else "weight"
    if "down_proj" in name:
        parts = {"down": weights}
    elif architecture == "gpt-oss":
        parts = {"gate": weights[..., ::2], "up": weights[..., 1::2]}
    else:
        gate, up = np.split(weights, 2, axis=1)
        parts = {"gate": gate, "up": up}
    turned = architecture == "gpt-oss" and kind == "weight"
    return {f"{prefix}ffn_{part}_exps.{kind}": one.swapaxes(1, 2) if turned else one for part, one in parts.items()}


def llama3_factors(theta: float, pairs: int, factor: float, original: int) -> NDArray[np.float32]:
    """Return the tensor `rope_freqs.weight` that the converter computes for Llama 3.1's scaling."""
    factors = []
    for pair in range(pairs):
        wavelength = 2 * np.pi * theta ** (pair / pairs)
        if wavelength < original / 4.0:
            factors.append(1.0)
        elif wavelength > original / 1.0:
            factors.append(factor)
        else:
            smooth = (original / wavelength - 1.0) / (4.0 - 1.0)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def logits(model: PreTrainedModel, tokens: Sequence[int]) -> NDArray[np.float32]:
    """Return the logits of `model` at all positions of one sequence."""
    with torch.no_grad():
        result: NDArray[np.float32] = model(input_ids=torch.tensor([list(tokens)])).logits[0].float().numpy()
    return result
