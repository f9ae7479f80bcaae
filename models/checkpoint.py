"""Sharp's own checkpoints: `.safetensors` (the configuration is JSON in its metadata), `.pt`, Hugging Face folders."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as safetensors_bytes
from torch import Tensor

from sharp.core.errors import InputError, NotFoundError
from sharp.models.causal_lm import SharpForCausalLM
from sharp.models.checkpoint_files import FORMAT, read_folder, read_pt, read_safetensors
from sharp.models.config import SharpConfig
from sharp.models.earlier_checkpoints import upgrade
from sharp.models.masked_lm import SharpForMaskedLM
from sharp.models.max_retrieval import MaxRetrieval, MaxRetrievalConfig
from sharp.models.number_sequence import SharpForNumbers

VERSION = 2  # `sharp.models.earlier_checkpoints` upgrades version 1
MOST_NAME = 300  # characters in the name of a parameter

DESCRIPTION = ("format", "version", "model", "config", "task", "task_parameters", "state_dict")
STORED_TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

Model = SharpForCausalLM | SharpForMaskedLM | MaxRetrieval | SharpForNumbers
Config = SharpConfig | MaxRetrievalConfig

# The format's field `model` -> class and configuration; files without this field hold a causal language model.
CAUSAL_LM = "causal-lm"
MODELS: dict[str, tuple[type[Model], type[Config]]] = {
    CAUSAL_LM: (SharpForCausalLM, SharpConfig),
    "masked-lm": (SharpForMaskedLM, SharpConfig),
    "max-retrieval": (MaxRetrieval, MaxRetrievalConfig),
    "numbers": (SharpForNumbers, SharpConfig),
}


@dataclass(frozen=True)
class Checkpoint:
    """A model and the task that it was trained for, None if the file does not name the task.

    `task_parameters` are the task's parameters in which the training differed from the task's defaults. `unread` are
    the keys of the file's description that no reader knows.
    """

    model: Model
    task: str | None
    task_parameters: dict[str, Any]
    unread: tuple[str, ...] = ()


def save_checkpoint(
    path: Path,
    model: Model,
    dtype: torch.dtype = torch.float32,
    task: str | None = None,
    task_parameters: Mapping[str, Any] | None = None,
) -> None:
    """Write `model` to `path`, as `.safetensors` or `.pt` by its suffix, with the task that it was trained for.

    Matrices are stored in `dtype`. Vectors (norms, the schemes' parameters per head) stay float32, because they need
    little space. The file is written as a whole or not at all; its folder is made if it does not exist.

    Raises:
        InputError: `path` has another suffix, or a weight is not finite in `dtype`.
        OSError, RuntimeError: the file cannot be written.
    """
    state = {
        name: tensor.detach().to("cpu", dtype if tensor.dim() > 1 else torch.float32).contiguous()
        for name, tensor in model.state_dict().items()
        if name not in _tied(model.config)
    }
    _check_finite(path, state)
    content = describe(model)
    if task is not None:
        content["task"] = task
        content["task_parameters"] = dict(task_parameters or {})
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    try:
        if path.suffix == ".safetensors":
            # save_file is not used, because it makes a file that only its owner can read.
            partial.write_bytes(safetensors_bytes(state, metadata={FORMAT: json.dumps(content)}))
        elif path.suffix == ".pt":
            torch.save({"format": FORMAT, **content, "state_dict": state}, partial)
        else:
            raise InputError(f"{path} must end in .safetensors or .pt")
        partial.replace(path)
    except (OSError, RuntimeError):
        partial.unlink(missing_ok=True)
        raise


def load_checkpoint(path: Path | str) -> SharpForCausalLM:
    """Load the causal language model in a file or Hugging Face folder of Sharp, float32, CPU, in evaluation mode.

    Raises:
        NotFoundError: the file or folder does not exist.
        InputError: the checkpoint is damaged, or holds a model of another kind.
    """
    model = read_checkpoint(path).model
    if not isinstance(model, SharpForCausalLM):
        raise InputError(f"{path} holds a {type(model).__name__}, but a SharpForCausalLM is needed here; give another")
    return model


def read_checkpoint(path: Path | str) -> Checkpoint:
    """Read a model of any kind of Sharp's and its task from a file or Hugging Face folder.

    The model is float32, on the CPU and in evaluation mode. Files of version 1 are upgraded.

    Raises:
        NotFoundError: the file or folder does not exist.
        InputError: the checkpoint is damaged, of another format or version, or lacks parameters that its configuration
            requires.
    """
    path = Path(path)
    if not path.exists():
        raise NotFoundError(f"checkpoint {path} does not exist; give a .safetensors or .pt file, or a folder")
    if path.is_dir():
        content, state = read_folder(path)
    elif path.suffix == ".safetensors":
        content, state = read_safetensors(path)
    elif path.suffix == ".pt":
        content, state = read_pt(path)
    else:
        raise InputError(f"{path} is not a Sharp checkpoint: its name must end in .safetensors or .pt")
    if not all(isinstance(name, str) and name.isprintable() and len(name) <= MOST_NAME for name in state):
        raise InputError(f"{path} is damaged: one of its parameters has a name that none has; copy or save it again")
    if content.get("version") == 1:
        content, state = upgrade(content, state)
    model_class, config = parse_description(path, content)
    task, parameters = content.get("task"), content.get("task_parameters", {})
    if not (task is None or isinstance(task, str)) or not isinstance(parameters, dict):
        raise InputError(f"{path} is damaged: its task is no name, or its task_parameters no object; save it again")
    _check_types(path, state)
    _check_finite(path, state)
    _check_state(path, model_class, config, state)
    model = _make(model_class, config)
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()}, strict=False)
    unread = tuple(sorted(str(name) for name in content if name not in DESCRIPTION))
    return Checkpoint(model.eval(), task, parameters, unread)


def start_from(model: Model, path: Path) -> None:
    """Load the weights of the checkpoint at `path` into `model`, in place; the norms of both may differ.

    Parameters of the model's own norm that the checkpoint does not have keep their start values.

    Raises:
        NotFoundError, InputError: the checkpoint cannot be read, or its model is of another kind or size.
    """
    state = read_checkpoint(path).model.state_dict()
    expected = model.state_dict()
    kept = {name: tensor for name, tensor in state.items() if not _of_norm(name) or name in expected}
    differing = [
        name
        for name in sorted(kept.keys() | {name for name in expected if not _of_norm(name)})
        if name not in kept or name not in expected or kept[name].shape != expected[name].shape
    ]
    if differing:
        raise InputError(
            f"{path} does not fit the model that is to be trained: {differing[0]} differs; give the sizes that it was "
            "trained with"
        )
    model.load_state_dict(kept, strict=False)


def _of_norm(name: str) -> bool:
    """Whether the parameter `name` belongs to the norm."""
    return "head_parameters." in name or "query_scale." in name


def describe(model: Model) -> dict[str, Any]:
    """Return the description of a model in its checkpoint (version, model and config), for `parse_description`."""
    name = next(name for name, (kind, _) in MODELS.items() if type(model) is kind)
    return {"version": VERSION, "model": name, "config": asdict(model.config)}


def parse_description(path: Path | str, content: dict[str, Any]) -> tuple[type[Model], Config]:
    """Return the class and the configuration from a description that `describe` made; the class has not been called.

    Raises:
        InputError: the description is of another version, or of no possible model; the message names `path`.
    """
    if content.get("version") != VERSION:
        raise InputError(
            f"{path} has checkpoint version {content.get('version')!r}, this Sharp reads {VERSION}; "
            "upgrade Sharp or save the checkpoint again"
        )
    name = content.get("model", CAUSAL_LM)
    if not isinstance(name, str) or name not in MODELS:
        raise InputError(f"{path} holds the model {name!r}, this Sharp knows {', '.join(MODELS)}; upgrade Sharp")
    model_class, config_class = MODELS[name]
    return model_class, _config(path, config_class, content.get("config"))


def _make(model_class: type[Model], config: Config) -> Model:
    """Make a model with random weights."""
    model: Model = model_class(config)  # type: ignore[arg-type] # the pairs of MODELS belong together
    return model


def _tied(config: Config) -> set[str]:
    """Return the parameters that are not stored because they share the values of others."""
    return {"lm_head.weight"} if isinstance(config, SharpConfig) and config.tie_embeddings else set()


def _config(path: Path | str, config_class: type[Config], values: object) -> Config:
    """Return the config in a checkpoint. InputError if `values` lack fields, or have unknown or wrong ones."""
    if not isinstance(values, dict):
        raise InputError(f"{path} has no model configuration; save it again with sharp.models.checkpoint")
    known = {field.name for field in fields(config_class)}
    if unknown := sorted(map(str, set(values) - known)):
        raise InputError(f"{path} has the unknown configuration field {unknown[0]!r}; upgrade Sharp")
    try:
        return config_class(**values)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except (TypeError, OverflowError) as error:
        raise InputError(f"{path} has an incomplete or malformed configuration: {error}") from error


def _check_types(path: Path, state: dict[str, Tensor]) -> None:
    """Check that all weights are plain tensors of a stored dtype, else raise InputError."""
    for name, tensor in state.items():
        if tensor.dtype not in STORED_TYPES or tensor.layout != torch.strided or tensor.is_meta:
            raise InputError(
                f"{path}: parameter {name} is of {tensor.dtype} ({tensor.layout}, on {tensor.device}), but must be a "
                f"plain tensor of one of {', '.join(map(str, STORED_TYPES))}; save it again"
            )


def _check_finite(path: Path, state: dict[str, Tensor]) -> None:
    """Check that no weight is NaN or infinite, else raise InputError."""
    for name, tensor in state.items():
        if not tensor.isfinite().all():
            raise InputError(f"{path}: parameter {name} has values that are not finite in {tensor.dtype}")


def _check_state(path: Path, model_class: type[Model], config: Config, state: dict[str, Tensor]) -> None:
    """Check that names and shapes of the weights are those of the configured model, else raise InputError."""
    try:
        with torch.device("meta"):  # without memory, because a wrong configuration may need more than there is
            expected = _make(model_class, config).state_dict()
    except RuntimeError as error:  # raised if a size exceeds the address space
        raise InputError(f"{path}: its configuration describes too large a model: {error}") from error
    for name in _tied(config):
        del expected[name]
    if missing := [name for name in expected if name not in state]:
        of_norm = [name for name in missing if _of_norm(name)]
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
