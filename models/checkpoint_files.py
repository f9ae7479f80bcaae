"""Readers of the files of Sharp's own checkpoints, which return description and tensors."""

import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sharp.core.errors import InputError
from sharp.models.safetensors_header import check_header

FORMAT = "sharp"
MODEL_TYPE = "sharp"  # model_type in `config.json` of a Hugging Face folder
FOLDER_PREFIX = "model."  # prefix of every parameter's name in a Hugging Face folder


def config_of(path: Path) -> dict[str, Any]:
    """Return the content of `config.json` in a Hugging Face folder; empty if there is none, or it is damaged."""
    try:
        content = json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def is_sharp_folder(path: Path) -> bool:
    """Whether `path` is a Hugging Face folder of one of our own models; False if it does not exist or is damaged."""
    return config_of(path).get("model_type") == MODEL_TYPE


def folder_files(path: Path) -> list[Path]:
    """Return the files of a Hugging Face folder that hold the model: .safetensors by name, then config.json.

    config.json is in the list even if it does not exist.
    """
    return [*sorted(path.glob("*.safetensors")), path / "config.json"]


def read_folder(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read description and tensors from a Hugging Face folder of one of our own models.

    The description is the entry "sharp" of config.json, unchecked. Names of tensors are without the prefix "model.".

    Raises:
        InputError: the folder is missing, damaged, no checkpoint of Sharp, or does not fit in memory.
    """
    if not is_sharp_folder(path):
        raise InputError(
            f"{path} is not a Hugging Face folder of a Sharp model: config.json must have model_type 'sharp'"
        )
    content = json.loads((path / "config.json").read_bytes()).get(FORMAT)
    *shards, _ = folder_files(path)
    if not isinstance(content, dict) or not shards:
        raise InputError(f"{path} is incomplete: it needs the entry 'sharp' in config.json, and .safetensors files")
    state: dict[str, Tensor] = {}
    for shard in shards:
        _, tensors = open_safetensors(shard)
        state |= {name.removeprefix(FOLDER_PREFIX): tensor for name, tensor in tensors.items()}
    return content, state


def read_safetensors(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read description and tensors from a .safetensors file; the description is not checked.

    Raises:
        InputError: the file is missing, damaged, no checkpoint of Sharp, has more than 20,000 tensors, or does not fit
            in memory.
    """
    metadata, state = open_safetensors(path)
    if FORMAT not in metadata:
        raise InputError(
            f"{path} is not a Sharp checkpoint: its metadata has no entry 'sharp'; save it with "
            "sharp.models.checkpoint, or give the whole folder of a Hugging Face model"
        )
    try:
        content = json.loads(metadata[FORMAT])
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is damaged: its metadata is not JSON; copy or save it again") from error
    if not isinstance(content, dict):
        raise InputError(
            f"{path} is not a Sharp checkpoint: its metadata entry 'sharp' is not an object; save it again"
        )
    return content, state


def open_safetensors(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the metadata and the tensors of a .safetensors file.

    Raises:
        InputError: the file is missing, damaged, has more than 20,000 tensors, or does not fit in memory.
    """
    check_header(path)
    try:
        with safe_open(path, framework="pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            return file.metadata() or {}, state
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{path} is damaged or not a safetensors file; copy or save it again") from error
    except (RuntimeError, MemoryError) as error:  # raised when memory is short, because torch maps the whole file
        size = path.stat().st_size / 2**30
        raise InputError(
            f"{path} has {size:,.1f} GiB, which do not fit in memory; use a machine with more, or a smaller model"
        ) from error


def shard_names(index: Path) -> set[str]:
    """Return the names of the files that an index of safetensors files (`model.safetensors.index.json`) lists.

    Raises:
        InputError: the index is damaged, or names a file outside its folder.
    """
    try:
        shards = set(json.loads(index.read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{index} is damaged: it has no weight_map; copy or save the checkpoint again") from error
    for shard in shards:
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise InputError(f"{index} keeps weights in {shard!r}, which is not in the folder; do not use it")
    return shards


def read_torch_file(path: Path) -> Any:
    """Read a file of torch.save that holds only plain data and tensors, which are put on the CPU.

    Raises:
        InputError: the file is missing, damaged or compressed, or holds other objects.
    """
    if not zipfile.is_zipfile(path):
        raise InputError(f"{path} is damaged or not a file that torch.save writes since 1.6; copy or save it again")
    try:
        with zipfile.ZipFile(path) as archive:  # torch never compresses; a compressed file may grow a thousandfold
            packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist())
        if not packed:
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{path} holds more than plain weights, which Sharp does not run; save its state_dict with "
            "sharp.models.checkpoint, or give a module of your own to sharp.export in Python"
        ) from error
    except Exception as error:  # unpickling a damaged file may raise anything
        raise InputError(f"{path} is damaged or not a file of torch.save; copy or save it again") from error
    raise InputError(f"{path} is compressed, which torch.save does not do; save it again")


def read_pt(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read description and tensors from a .pt file; the description, unchecked, includes the tensors as "state_dict".

    Raises:
        InputError: the file is missing, damaged, or no checkpoint of Sharp.
    """
    content = read_torch_file(path)
    state = content.get("state_dict") if isinstance(content, dict) else None
    if (
        not isinstance(content, dict)
        or content.get("format") != FORMAT
        or not isinstance(state, dict)
        or not all(isinstance(tensor, Tensor) for tensor in state.values())
    ):
        raise InputError(
            f"{path} is not a Sharp checkpoint: it must hold format 'sharp', version, config and state_dict; "
            "save it with sharp.models.checkpoint"
        )
    return content, state
