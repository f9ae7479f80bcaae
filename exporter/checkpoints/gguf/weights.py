"""The weights of a GGUF file under transformers' names and in transformers' layout."""

import re
from collections.abc import Mapping

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sharp.core.errors import InputError
from sharp.exporter.checkpoints.gguf.config import GgufArchitecture
from sharp.exporter.checkpoints.gguf.file import GgufFile

Array = NDArray[np.float32]
ARCHITECTURE_IDS = {name: identifier for identifier, name in gguf.MODEL_ARCH_NAMES.items()}
# Parameters of transformers that hold all experts in one tensor, and their names in GGUF.
EXPERTS = {
    "experts.gate_up_proj": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "experts.gate_up_proj_bias": ("ffn_gate_exps.bias", "ffn_up_exps.bias"),
    "experts.down_proj": ("ffn_down_exps.weight",),
    "experts.down_proj_bias": ("ffn_down_exps.bias",),
    "mlp.e_score_correction_bias": ("exp_probs_b.bias",),
}
# Biases that llama.cpp adds only if the file has them. A model of transformers has all biases of a kind or none.
OPTIONAL = re.compile(r"\.(attn_(q|k|v|output)|ffn_(gate|up|down))\.bias$")


def weight_names(file: GgufFile, architecture: GgufArchitecture, model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the names of the tensors that each parameter of `model` is made of, by the parameter's name.

    The names are empty for biases that are 0, and for an output layer that is tied to the embedding.

    Raises:
        InputError: a tensor is missing.
    """
    layers = file.integer("block_count")
    names = gguf.get_tensor_name_map(ARCHITECTURE_IDS[architecture.name], layers)
    tied = not file.has_tensor("output.weight")
    found: dict[str, tuple[str, ...]] = {}
    for parameter in model.state_dict():
        if parameter == "lm_head.weight":
            sources: tuple[str, ...] = () if tied else ("output.weight",)
        else:
            sources = _sources(parameter, names)
        missing = [source for source in sources if not file.has_tensor(source)]
        if missing and OPTIONAL.search(missing[0]):
            sources = ()
        elif missing:
            raise InputError(
                f"{file.path} is incomplete: it has no {missing[0]}, which {parameter} is made of; convert or "
                "copy the model again"
            )
        found[parameter] = sources
    return found


def _sources(parameter: str, names: gguf.TensorNameMap) -> tuple[str, ...]:
    """Return the names of the GGUF tensors that make up a transformers parameter.

    It is several for experts; a parameter without a known name has its own.
    """
    layer = re.search(r"\.layers\.(\d+)\.", parameter)
    for ending, sources in EXPERTS.items():
        if layer is not None and parameter.endswith(ending):
            return tuple(f"blk.{layer[1]}.{source}" for source in sources)
    name = names.get_name(parameter, try_suffixes=(".weight", ".bias"))
    if name is None:
        return (parameter,)
    return (name if name.endswith((".weight", ".bias")) else f"{name}.weight",)


def read_weights(
    file: GgufFile, architecture: GgufArchitecture, model: nn.Module, sources: Mapping[str, tuple[str, ...]]
) -> dict[str, Tensor]:
    """Return the state dict of `model` in float32; `sources` is the result of `weight_names`.

    A tied output layer is left out. `model` may be on the device "meta".

    Raises:
        InputError: a tensor has another shape than the configuration says.
    """
    state: dict[str, Tensor] = {}
    for parameter, expected in model.state_dict().items():
        names = sources[parameter]
        if not names:
            if parameter != "lm_head.weight":
                state[parameter] = torch.zeros(expected.shape)
            continue
        arrays = [_stored(file, architecture, name) for name in names]
        weights = torch.from_numpy(np.require(_form(architecture.name, parameter, arrays), requirements=["C", "W"]))
        if weights.shape != expected.shape and weights.numel() == expected.numel():
            weights = weights.reshape(expected.shape)  # GGUF stores a matrix of one row or one column as a vector
        if weights.shape != expected.shape:
            raise InputError(
                f"{file.path}: {names[0]} has the shape {list(weights.shape)}, but {list(expected.shape)} is right by "
                "the metadata; copy the file again"
            )
        state[parameter] = weights
    return state


def _stored(file: GgufFile, architecture: GgufArchitecture, name: str) -> Array:
    """Return a tensor in transformers' form: undo the changes of llama.cpp's converter to queries, keys and norms."""
    weights: Array = file.tensor(name)
    if architecture.paired and (query_or_key := re.search(r"\.attn_(q|k)\.", name)):
        heads = file.integer("attention.head_count")
        rows = heads if query_or_key[1] == "q" else file.integer("attention.head_count_kv", heads)
        if weights.shape[0] % (2 * rows) == 0:
            pairs = weights.reshape(rows, weights.shape[0] // rows // 2, 2, *weights.shape[1:])
            weights = pairs.swapaxes(1, 2).reshape(weights.shape)
    if architecture.norm_offset and name.endswith("norm.weight"):
        weights = weights - 1
    return weights


def _form(architecture: str, parameter: str, arrays: list[Array]) -> Array:
    """Combine the tensors of a transformers parameter, in llama.cpp's layout, into its layout.

    Several tensors are joined along their second axis; only gpt-oss interleaves them.
    """
    if architecture == "gpt2" and arrays[0].ndim == 2 and re.search(r"\.c_\w+\.weight$", parameter):
        return arrays[0].T
    if architecture == "gpt-oss" and ".experts." in parameter:
        if not parameter.endswith("_bias"):
            arrays = [array.swapaxes(1, 2) for array in arrays]
        return arrays[0] if len(arrays) == 1 else np.stack(arrays, axis=-1).reshape(*arrays[0].shape[:-1], -1)
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=1)
