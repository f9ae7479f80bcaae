"""The file of `--trained-norm FILE`, which says which weights of a Hugging Face model its norm has learned.

The file is TOML or JSON. The same content may be the entry "trained_norm" of the model's `config.json`:

```toml
norm = "ssa"
alpha = 1.5           # options of the norm that are not its defaults: alpha, gamma, temperature_coefficients
positions = "own"     # or none, alibi, nape: in place of the model's rotary embedding
softcap = 0.0         # in place of the model's soft cap; `scale` likewise. Default: the model's own
ignore = ["*.mask"]   # weights that are left out silently

[parameters]          # {layer} is the layer's number
b = { name = "transformer.h.{layer}.attn.a", transform = "exp" }  # or softplus, one_plus_softplus, tanh
n = 1.5  # one number for all heads, or a list with a list for each layer: [[head, ...], ...]
```
"""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor
from torch.nn import functional

from sharp.core.errors import InputError, NotFoundError
from sharp.exporter.checkpoints.authors_models import norm_of_configuration
from sharp.exporter.checkpoints.nano_gpt import is_ssa_nano_gpt
from sharp.models.adapted_model import MODEL_TYPE, AdaptedNorm, Positions, read_adapted_norm
from sharp.models.norms import get_norm
from sharp.models.trained_attention import ENTRY as ATTENTION_ENTRY

MOST_BYTES = 2**20
ENTRY = "trained_norm"  # a key of config.json

Transform = Literal["none", "exp", "softplus", "one_plus_softplus", "tanh"]
TRANSFORMS: dict[Transform, Callable[[Tensor], Tensor]] = {
    "none": lambda value: value,
    "exp": torch.exp,
    "softplus": functional.softplus,
    "one_plus_softplus": lambda value: 1.0 + functional.softplus(value),
    "tanh": torch.tanh,
}
# The learned inputs of each norm: one number per head, except for the projections of assmax and asentmax.
INPUTS = {
    "ssa": ("b", "n"),
    "ssmax": ("s",),
    "ssmax-bias": ("s", "b"),
    "sentmax": ("beta", "gamma"),
    "assmax": ("beta.weight", "beta.bias", "gamma.weight", "gamma.bias"),
    "asentmax": ("beta.weight", "beta.bias", "gamma.weight", "gamma.bias"),
    "log-power": ("gamma",),
    "llama4": ("beta",),
}


class Weights(BaseModel):
    """The weights that are an input of the norm: their name, and what is done to their values."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str
    transform: Transform = "none"


class TrainedNorm(BaseModel):
    """The content of a `--trained-norm` file: the norm that a checkpoint was trained with, and its parameters.

    `parameters` maps each learned parameter of the norm to a number, lists of numbers, or the name of the weights that
    hold it. None means the norm's default. `ignore` names weights that the norm does not need.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    norm: str
    alpha: float | None = None
    gamma: float | None = None
    temperature_coefficients: str | list[float] | None = None
    positions: Positions = "own"
    softcap: float | None = None
    scale: float | None = None
    scaled_heads: int | None = None
    length_onset: int | None = None
    parameters: dict[str, float | str | list[list[float]] | Weights] = {}
    ignore: list[str] = []

    def check(self, where: str) -> None:
        """Check the norm and its parameters; `where` is the file for messages.

        Raises:
            InputError: the norm is unknown, a parameter of the norm is missing, or the norm does not have a parameter.
        """
        try:
            get_norm(self.norm)
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
        inputs = tuple(name for name in INPUTS.get(self.norm, ()) if self.gamma is None or not name.startswith("gamma"))
        unknown = [name for name in self.parameters if name not in inputs]
        missing = [name for name in inputs if name not in self.parameters and not name.endswith(".bias")]
        if unknown or missing:
            has = f"has {', '.join(inputs)}" if inputs else "has no parameters"
            what = f"names the parameter {unknown[0]!r}" if unknown else f"does not say the parameter {missing[0]!r}"
            raise InputError(f"{where} {what}; norm {self.norm} {has}")


def read_trained_norm(path: Path) -> TrainedNorm:
    """Read the description of a trained norm, as JSON if the name of the file ends in `.json`, else as TOML.

    Raises:
        NotFoundError: there is no such file.
        InputError: the file is not valid.
    """
    if not path.is_file():
        raise NotFoundError(f"{path} does not exist; give a TOML or JSON file with --trained-norm")
    if path.stat().st_size > MOST_BYTES:
        raise InputError(f"{path} has {path.stat().st_size} bytes, but may have {MOST_BYTES}; give a smaller one")
    try:
        text = path.read_text(encoding="utf-8")
        content: Any = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not valid: {error or 'too deep'}") from error
    return _validated(content, str(path))


def _validated(content: object, where: str) -> TrainedNorm:
    """Return a JSON value as `TrainedNorm`. InputError names the first wrong field and the file `where`."""
    try:
        read = TrainedNorm.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the content"
        raise InputError(f"{where} is not valid: {field}: {first['msg']}") from error
    read.check(where)
    return read


def stored_norm(path: Path) -> TrainedNorm | AdaptedNorm | None:
    """Return the trained norm that the `config.json` of a Hugging Face folder describes.

    None if it describes none, or if there is no `config.json` or none that can be read.

    Raises:
        InputError: the description is not valid.
    """
    try:
        content = json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(content, dict):
        return None
    if content.get("model_type") == MODEL_TYPE:
        return read_adapted_norm(content.get("sharp"))
    if (attention := content.get(ATTENTION_ENTRY)) is not None:
        return read_adapted_norm(attention)
    if (written := norm_of_configuration(content, str(path / "config.json"))) is not None:
        return _validated(written, str(path / "config.json"))
    if (entry := content.get(ENTRY)) is not None:
        return _validated(entry, f"the entry {ENTRY!r} of {path / 'config.json'}")
    return None


def recorded_norm(path: Path) -> str | None:
    """Return the norm that a folder's `config.json` describes, or ssa for a file of the SSA authors' nanoGPT.

    None for every other checkpoint. A nanoGPT that was trained with softmax gives ssa, too.

    Raises:
        InputError: the description in `config.json` is not valid, or a file with `model_args` holds no weights.
    """
    if is_ssa_nano_gpt(path):
        return "ssa"
    found = stored_norm(path)
    return None if found is None else found.norm
