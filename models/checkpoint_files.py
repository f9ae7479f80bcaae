"""Reading the files of Sharp's own checkpoints: their description and tensors, nothing else."""

import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sharp.models.safetensors_header import check_header
from sharp.plugins.errors import InputError

FORMAT = "sharp"
MODEL_TYPE = "sharp"  # what `config.json` of a Hugging Face folder says
FOLDER_PREFIX = "model."  # of every parameter in such a folder


def is_sharp_folder(path: Path) -> bool:
    """Whether `path` is a Hugging Face folder of our own models."""
    try:
        content = json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and content.get("model_type") == MODEL_TYPE


def folder_files(path: Path) -> list[Path]:
    """The files of a Hugging Face folder that hold the model: its weights, then its configuration."""
    return [*sorted(path.glob("*.safetensors")), path / "config.json"]


def read_folder(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a Hugging Face folder of our own models holds: description and tensors.

    Raises:
        InputError: it is damaged, or no checkpoint of Sharp.
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
        _, tensors = _open_safetensors(shard)
        state |= {name.removeprefix(FOLDER_PREFIX): tensor for name, tensor in tensors.items()}
    return content, state


def read_safetensors(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a .safetensors file holds: description and tensors.

    Raises:
        InputError: it is damaged, or no checkpoint of Sharp.
    """
    metadata, state = _open_safetensors(path)
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
        raise InputError(f"{path} is not a Sharp checkpoint: its metadata entry 'sharp' is not an object")
    return content, state


def _open_safetensors(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    check_header(path)
    try:
        with safe_open(path, framework="pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            return file.metadata() or {}, state
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{path} is damaged or not a safetensors file; copy or save it again") from error
    except (RuntimeError, MemoryError) as error:  # torch maps the whole file
        size = path.stat().st_size / 2**30
        raise InputError(
            f"{path} has {size:,.1f} GiB, which do not fit in memory; use a machine with more, or a smaller model"
        ) from error


def read_torch_file(path: Path) -> Any:
    """What torch.save wrote, if that is plain data and tensors.

    Raises:
        InputError: it is damaged, or holds more.
    """
    if not zipfile.is_zipfile(path):
        raise InputError(f"{path} is damaged or not a file that torch.save writes since 1.6; copy or save it again")
    try:
        with zipfile.ZipFile(path) as archive:  # torch never packs; what is packed may grow a thousandfold
            packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist())
        if not packed:
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{path} holds more than plain weights, which Sharp does not run; save its state_dict with "
            "sharp.models.checkpoint, or give a module of your own to sharp.export in Python"
        ) from error
    except Exception as error:  # what its pickle says is done step by step, and any step may fail
        raise InputError(f"{path} is damaged or not a file of torch.save; copy or save it again") from error
    raise InputError(f"{path} is compressed, which torch.save does not do; save it again")


def read_pt(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a .pt file holds: description and tensors.

    Raises:
        InputError: it is damaged, or no checkpoint of Sharp.
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
