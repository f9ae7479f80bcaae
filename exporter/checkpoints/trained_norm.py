"""`--trained-norm FILE`: which weights of a Hugging Face model are what its attention's norm has learned.

As TOML or JSON, or as the entry "trained_norm" of the model's `config.json`:

```toml
norm = "ssa"
alpha = 1.5           # the norm's options where they are not its defaults: alpha, gamma, temperature_coefficients
positions = "own"     # or none, alibi, nape: in place of the model's rotary embedding
softcap = 0.0         # in place of the model's, and so scale; both the model's own where left out
ignore = ["*.mask"]   # weights that are left out without a word

[parameters]          # {layer} is the layer's number
b = { name = "transformer.h.{layer}.attn.a", transform = "exp" }  # or softplus, one_plus_softplus, tanh
n = 1.5  # a number is that of all heads, a list of lists [[head, ...], ...] that of every layer and head
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

from sharp.exporter.checkpoints.authors_models import norm_of_configuration
from sharp.exporter.checkpoints.nano_gpt import is_ssa_nano_gpt
from sharp.models.adapted_model import MODEL_TYPE, AdaptedNorm, Positions, read_adapted_norm
from sharp.models.norms import get_norm
from sharp.models.trained_attention import ENTRY as ATTENTION_ENTRY
from sharp.plugins.errors import InputError, NotFoundError

MOST_BYTES = 2**20
ENTRY = "trained_norm"  # of config.json

Transform = Literal["none", "exp", "softplus", "one_plus_softplus", "tanh"]
TRANSFORMS: dict[Transform, Callable[[Tensor], Tensor]] = {
    "none": lambda value: value,
    "exp": torch.exp,
    "softplus": functional.softplus,
    "one_plus_softplus": lambda value: 1.0 + functional.softplus(value),
    "tanh": torch.tanh,
}
# The norm's inputs: per head, but for the projections of assmax and asentmax.
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
    """A file's content."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    norm: str
    alpha: float | None = None
    gamma: float | None = None
    temperature_coefficients: str | None = None
    positions: Positions = "own"
    softcap: float | None = None
    scale: float | None = None
    scaled_heads: int | None = None
    length_onset: int | None = None
    parameters: dict[str, float | str | list[list[float]] | Weights] = {}
    ignore: list[str] = []

    def check(self, where: str) -> None:
        """Raises InputError if the norm is unknown, or lacks parameters or has others."""
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
    """Read a file, JSON where its name ends so.

    Raises:
        NotFoundError: there is no such file.
        InputError: it is not valid.
    """
    if not path.is_file():
        raise NotFoundError(f"{path} does not exist; give a TOML or JSON file with --trained-norm")
    if path.stat().st_size > MOST_BYTES:
        raise InputError(f"{path} has {path.stat().st_size} bytes, but may have {MOST_BYTES}")
    try:
        text = path.read_text(encoding="utf-8")
        content: Any = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not valid: {error or 'too deep'}") from error
    return _validated(content, str(path))


def _validated(content: object, where: str) -> TrainedNorm:
    try:
        read = TrainedNorm.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the content"
        raise InputError(f"{where} is not valid: {field}: {first['msg']}") from error
    read.check(where)
    return read


def stored_norm(path: Path) -> TrainedNorm | AdaptedNorm | None:
    """The norm that the `config.json` of a Hugging Face folder says; None where it says none.

    Raises:
        InputError: what it says is not valid.
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
    """The norm that a folder's `config.json` or the SSA authors' file names; None for every other checkpoint.

    Raises:
        InputError: what it says cannot be read.
    """
    if is_ssa_nano_gpt(path):
        return "ssa"
    found = stored_norm(path)
    return None if found is None else found.norm
