"""The file of `--norm-map FILE`, which gives some layers and heads other norms, as TOML or JSON.

```toml
[[norms]]
layers = [0, 1]   # default: all layers
heads = [3, 4, 5] # query heads; default: all heads
norm = "entmax"
alpha = 1.5       # the options of the norm, under the names of sharp-export's options
```
"""

import json
import tomllib
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from sharp.core.errors import InputError, NotFoundError
from sharp.exporter.sources.norm_options import NormOptions
from sharp.models.attention import HeadGroup
from sharp.models.config import SharpConfig
from sharp.models.norms import get_norm

MOST_BYTES = 2**20


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    norm: str
    layers: list[int] | None = None
    heads: list[int] | None = None
    alpha: float | None = None
    ssa_b: float | None = None
    ssa_n: float | None = None
    temperature: float | None = None
    temperature_coefficients: str | None = None
    log_length_offset: int | None = None


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    norms: list[_Entry]


@dataclass(frozen=True)
class MappedNorm:
    """One entry of a norm map: a norm and its options, for some layers and query heads; None means all of them."""

    norm: str
    layers: tuple[int, ...] | None
    heads: tuple[int, ...] | None
    options: NormOptions


def read_norm_map(path: Path) -> tuple[MappedNorm, ...]:
    """Read a norm map, as JSON if the name of the file ends in `.json`, else as TOML.

    Raises:
        NotFoundError: there is no such file.
        InputError: the file is not valid or too large, an option is not for its norm, or a norm does not exist, has no
            start values or can only be the norm of all heads.
    """
    if not path.is_file():
        raise NotFoundError(f"norm map {path} does not exist; give a TOML or JSON file with --norm-map")
    if path.stat().st_size > MOST_BYTES:
        raise InputError(
            f"norm map {path} has {path.stat().st_size} bytes, but may have {MOST_BYTES}; give a smaller one"
        )
    try:
        text = path.read_text(encoding="utf-8")
        content: Any = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        entries = _File.model_validate(content).norms
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the file"
        raise InputError(f"norm map {path} is not valid: {field}: {first['msg']}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"norm map {path} is not valid: {error or 'too deep'}") from error
    return tuple(_mapped(path, index, entry) for index, entry in enumerate(entries))


def _mapped(path: Path, index: int, entry: _Entry) -> MappedNorm:
    """Check an entry of the norm map and return it with its norm and options; `index` is its number for messages.

    Raises:
        InputError: the norm or an option is not possible in a map.
    """
    names = [field.name for field in fields(NormOptions) if field.name != "length_onset"]
    options = NormOptions(**{name: getattr(entry, name) for name in names})
    where = f"norm map {path}, entry {index}"
    try:
        options.check(entry.norm)
        scheme = get_norm(entry.norm)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
    if scheme.scale_kind in ("head", "token"):
        raise InputError(f"{where}: norm {entry.norm} learns its scale in training; it can only be a model's --norm")
    if scheme.scale_kind in ("log-power", "llama4"):
        raise InputError(f"{where}: the scale of {entry.norm} can be of all heads only; give it with --norm")
    if entry.norm == "fixed-temperature" and options.temperature is None:
        raise InputError(f"{where}: fixed-temperature needs a temperature; add the entry temperature")
    layers, heads = (None if numbers is None else tuple(numbers) for numbers in (entry.layers, entry.heads))
    return MappedNorm(entry.norm, layers, heads, options)


@dataclass(frozen=True)
class HeadMap:
    """The norms of the heads of every layer.

    `layers[i]` has a norm and its heads for each entry of the map that names heads of layer i, and for the heads that
    no entry names. `entries[i]` has these entries in the same order, None for the model's own norm.
    """

    layers: tuple[tuple[HeadGroup, ...], ...]
    entries: tuple[tuple[MappedNorm | None, ...], ...]

    def nodes(self, layer: int) -> tuple[HeadGroup, ...]:
        """Return a layer's norms, each configuration once, as its attention nodes compute them.

        Heads whose norms differ in parameters only, such as b and n of ssa, share a node.
        """
        heads: dict[SharpConfig, list[int]] = {}
        for norm in self.layers[layer]:
            heads.setdefault(norm.config, []).extend(norm.heads)
        return tuple(HeadGroup(tuple(sorted(of_config)), config) for config, of_config in heads.items())


def map_heads(config: SharpConfig, entries: tuple[MappedNorm, ...], path: Path) -> HeadMap:
    """Return the norm of every head of a model; `path` is the file of the map, for messages.

    Raises:
        NotFoundError: a file of temperature coefficients does not exist.
        InputError: an entry names a layer or head that the model does not have, or that another entry has named; or
            the model cannot have a norm with these options.
    """
    chosen: dict[tuple[int, int], int] = {}
    for index, entry in enumerate(entries):
        layers = _checked(path, index, "layer", entry.layers, config.layers)
        heads = _checked(path, index, "head", entry.heads, config.q_heads)
        for place in ((layer, head) for layer in layers for head in heads):
            if place in chosen:
                raise InputError(
                    f"norm map {path}, entry {index}: layer {place[0]}, head {place[1]} has a norm from entry "
                    f"{chosen[place]} already; name it once"
                )
            chosen[place] = index
    configs = [_config(config, entry, f"norm map {path}, entry {index}") for index, entry in enumerate(entries)]
    norms, sources = [], []
    for layer in range(config.layers):
        by_entry: dict[int, list[int]] = {}
        for head in range(config.q_heads):
            by_entry.setdefault(chosen.get((layer, head), -1), []).append(head)
        order = sorted(by_entry)
        norms.append(
            tuple(HeadGroup(tuple(by_entry[index]), config if index < 0 else configs[index]) for index in order)
        )
        sources.append(tuple(None if index < 0 else entries[index] for index in order))
    return HeadMap(tuple(norms), tuple(sources))


def _config(config: SharpConfig, entry: MappedNorm, where: str) -> SharpConfig:
    """Return the config with the entry's norm and options.

    InputError, beginning with `where`, for options out of range.
    """
    # With alpha 0, SharpConfig takes the default alpha of the norm.
    given = {"alpha": 0.0, "temperature": 1.0} | entry.options.config_fields()
    try:
        return replace(config, norm=entry.norm, gamma=None, **given)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def _checked(path: Path, index: int, name: str, given: tuple[int, ...] | None, count: int) -> tuple[int, ...]:
    """Return the layer or head numbers `given`, without repetition; all of 0 ... count - 1 if None.

    `name` is "layer" or "head". InputError for a number out of range. `index` is the number of the map's entry, for the
    message.
    """
    if given is None:
        return tuple(range(count))
    for number in given:
        if not 0 <= number < count:
            raise InputError(
                f"norm map {path}, entry {index}: there is no {name} {number}; the model has {count}, from 0"
            )
    return tuple(dict.fromkeys(given))
