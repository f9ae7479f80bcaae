"""The state of a run, saved regularly, from which a run that was killed continues to the same weights."""

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from sharp.core.errors import InputError
from sharp.exporter.adapt.recipe import Recipe

STATE_FILE = "state.safetensors"


@dataclass(frozen=True)
class RunState:
    """The content of a state file beside its tensors.

    `identity` is what two runs must share for one to continue the other, `step` the number of steps that are done, and
    `seconds` the time that they took.
    """

    recipe: Recipe
    identity: str
    step: int
    seconds: float


def read_state(folder: Path) -> RunState | None:
    """Read the state in `folder`, without its tensors; None if there is none.

    Raises:
        InputError: the state is damaged.
    """
    path = folder / STATE_FILE
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            content = json.loads((file.metadata() or {})["run"])
        return RunState(Recipe(**content["recipe"]), content["identity"], content["step"], content["seconds"])
    except Exception as error:  # safetensors raises errors of its own
        raise InputError(f"{path} is damaged; remove the folder {folder} to start again") from error


def state_of(folder: Path, identity: str) -> RunState | None:
    """Read the state in `folder` and check that it is of the run with this identity; None if there is none.

    Raises:
        InputError: the state is of another run, or damaged.
    """
    state = read_state(folder)
    if state is not None and state.identity != identity:
        raise InputError(f"{folder} holds a run with other settings; remove it, or choose another folder")
    return state


def save_state(folder: Path, learned: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, run: RunState) -> None:
    """Write the state as a whole or not at all, because the process may be killed at any time.

    `folder` is made if it does not exist. `learned` are the trained parameters by name; `optimizer` is of Adam's kind.

    Raises:
        InputError: the state cannot be written, for example because the disk is full.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in learned.items():
        tensors[f"weights.{name}"] = parameter.detach().cpu().contiguous()
        for moment in ("exp_avg", "exp_avg_sq"):
            if moment in optimizer.state[parameter]:
                tensors[f"{moment}.{name}"] = optimizer.state[parameter][moment].cpu().contiguous()
    partial = folder / f"{STATE_FILE}.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, partial, {"run": json.dumps(asdict(run))})
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(folder / STATE_FILE)
    except Exception as error:  # safetensors raises errors of its own
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise InputError(
            f"the state of the run cannot be written to {folder}: {error}; make room, then resume"
        ) from error


@torch.no_grad()
def load_state(folder: Path, learned: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, step: int) -> None:
    """Load the tensors of the state in `folder` into the parameters and the optimizer, in place.

    `read_state` must have found the state before; `step` is its number of steps. The names must be those of the state.
    """
    with safe_open(folder / STATE_FILE, framework="pt") as file:
        kept = set(file.keys())
        for name, parameter in learned.items():
            parameter.copy_(file.get_tensor(f"weights.{name}"))
            if f"exp_avg.{name}" in kept:  # a parameter without gradients has no moments
                moments = {
                    kind: file.get_tensor(f"{kind}.{name}").to(parameter.device) for kind in ("exp_avg", "exp_avg_sq")
                }
                optimizer.state[parameter] = {"step": torch.tensor(float(step)), **moments}
