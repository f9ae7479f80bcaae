"""Sharp's own checkpoints: `.safetensors` (the configuration is JSON in its metadata) and `.pt`."""

import json
import pickle
import zipfile
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as safetensors_bytes
from torch import Tensor

from sharp.models.causal_lm import SharpForCausalLM
from sharp.models.config import SharpConfig
from sharp.plugins.errors import InputError, NotFoundError

FORMAT = "sharp"
VERSION = 1


def save_checkpoint(path: Path, model: SharpForCausalLM, dtype: torch.dtype = torch.float32) -> None:
    """Write `model` to `path`, as `.safetensors` or `.pt` by its suffix.

    Matrices are stored in `dtype`; vectors (norms, the schemes' parameters per head) stay float32, as they weigh
    nothing. The file appears complete or not at all.

    Raises:
        InputError: the suffix is another one, or a weight is not finite in `dtype`.
    """
    state = {
        name: tensor.detach().to(dtype if tensor.dim() > 1 else torch.float32).contiguous()
        for name, tensor in model.state_dict().items()
        if not (model.config.tie_embeddings and name == "lm_head.weight")
    }
    _check_finite(path, state)
    content = {"version": VERSION, "config": asdict(model.config)}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    if path.suffix == ".safetensors":
        # Not save_file: it makes a file that only its owner can read.
        partial.write_bytes(safetensors_bytes(state, metadata={FORMAT: json.dumps(content)}))
    elif path.suffix == ".pt":
        torch.save({"format": FORMAT, **content, "state_dict": state}, partial)
    else:
        raise InputError(f"{path} must end in .safetensors or .pt")
    partial.replace(path)


def load_checkpoint(path: Path | str) -> SharpForCausalLM:
    """The model in a file that `save_checkpoint` wrote, float32, in evaluation mode.

    Raises:
        NotFoundError: there is no such file.
        InputError: the file is damaged, of another format or version, or does not hold the parameters that its
            configuration asks for.
    """
    path = Path(path)
    if not path.is_file():
        raise NotFoundError(f"checkpoint {path} does not exist; give the path of a .safetensors or .pt file")
    if path.suffix == ".safetensors":
        content, state = _read_safetensors(path)
    elif path.suffix == ".pt":
        content, state = _read_pt(path)
    else:
        raise InputError(f"{path} is not a Sharp checkpoint: its name must end in .safetensors or .pt")
    if content.get("version") != VERSION:
        raise InputError(
            f"{path} has checkpoint version {content.get('version')!r}, this Sharp reads {VERSION}; "
            "upgrade Sharp or save the checkpoint again"
        )
    config = _config(path, content.get("config"))
    _check_finite(path, state)
    _check_state(path, config, state)
    model = SharpForCausalLM(config)
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()}, strict=False)
    return model.eval()


def _read_safetensors(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        if FORMAT in metadata:
            content = json.loads(metadata[FORMAT])
            if isinstance(content, dict):
                return content, state
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{path} is damaged or not a safetensors file; copy or save it again") from error
    raise InputError(
        f"{path} is not a Sharp checkpoint: its metadata has no entry 'sharp'; save it with sharp.models.checkpoint"
    )


def _read_pt(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not zipfile.is_zipfile(path):
        raise InputError(f"{path} is damaged or not a file of torch.save; copy or save it again")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{path} holds more than plain weights, which Sharp does not run; save its state_dict with "
            "sharp.models.checkpoint"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise InputError(f"{path} is damaged or not a file of torch.save; copy or save it again") from error
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


def _config(path: Path, values: object) -> SharpConfig:
    if not isinstance(values, dict):
        raise InputError(f"{path} has no model configuration; save it again with sharp.models.checkpoint")
    known = {field.name for field in fields(SharpConfig)}
    if unknown := sorted(set(values) - known):
        raise InputError(f"{path} has the unknown configuration field {unknown[0]!r}; upgrade Sharp")
    try:
        return SharpConfig(**values)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except TypeError as error:
        raise InputError(f"{path} has an incomplete or malformed configuration: {error}") from error


def _check_finite(path: Path, state: dict[str, Tensor]) -> None:
    for name, tensor in state.items():
        if not tensor.isfinite().all():
            raise InputError(f"{path}: parameter {name} has values that are not finite in {tensor.dtype}")


def _check_state(path: Path, config: SharpConfig, state: dict[str, Tensor]) -> None:
    with torch.device("meta"):  # a wrong configuration may ask for more memory than there is
        expected = SharpForCausalLM(config).state_dict()
    if config.tie_embeddings:
        del expected["lm_head.weight"]
    if missing := [name for name in expected if name not in state]:
        of_norm = [name for name in missing if ".head_parameters." in name or ".query_scale." in name]
        owner = f"norm {config.norm}" if of_norm else "its configuration"
        raise InputError(
            f"{path} lacks {len(missing)} parameters that {owner} needs, the first is {(of_norm or missing)[0]}; "
            "choose the norm that the checkpoint was trained with, or train it with this one"
        )
    if unexpected := [name for name in state if name not in expected]:
        raise InputError(f"{path} has {len(unexpected)} parameters too many, the first is {unexpected[0]}")
    for name, tensor in state.items():
        if tensor.shape != expected[name].shape:
            raise InputError(
                f"{path}: parameter {name} has shape {list(tensor.shape)}, its configuration needs "
                f"{list(expected[name].shape)}"
            )
