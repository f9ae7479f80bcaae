"""`--norm-map FILE`: other norms for some layers and heads, as TOML or JSON.

```toml
[[norms]]
layers = [0, 1]   # all where left out
heads = [3, 4, 5] # query heads, all where left out
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

from sharp.exporter.checkpoints.norm_options import NormOptions
from sharp.models.attention import HeadNorm
from sharp.models.config import SharpConfig
from sharp.models.norms import get_norm
from sharp.plugins.errors import InputError, NotFoundError

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
    """One entry: the norm and its options, for query heads of layers; None is all."""

    norm: str
    layers: tuple[int, ...] | None
    heads: tuple[int, ...] | None
    options: NormOptions


def read_norm_map(path: Path) -> tuple[MappedNorm, ...]:
    """Read a file, JSON where its name ends so.

    Raises:
        NotFoundError: there is no such file.
        InputError: it is not valid, or a norm in it does not exist or has no start values.
    """
    if not path.is_file():
        raise NotFoundError(f"norm map {path} does not exist; give a TOML or JSON file with --norm-map")
    if path.stat().st_size > MOST_BYTES:
        raise InputError(f"norm map {path} has {path.stat().st_size} bytes, but may have {MOST_BYTES}")
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
        raise InputError(f"{where}: fixed-temperature needs a temperature")
    layers, heads = (None if one is None else tuple(one) for one in (entry.layers, entry.heads))
    return MappedNorm(entry.norm, layers, heads, options)


@dataclass(frozen=True)
class HeadMap:
    """For every layer, the norms of its heads, one for each entry (None: the model's own norm), and the nodes.

    Heads whose norms differ in parameters only, such as b and n of ssa, are in one node.
    """

    layers: tuple[tuple[HeadNorm, ...], ...]
    entries: tuple[tuple[MappedNorm | None, ...], ...]

    def nodes(self, layer: int) -> tuple[HeadNorm, ...]:
        """The norms of a layer as they are computed: of each configuration once."""
        heads: dict[SharpConfig, list[int]] = {}
        for norm in self.layers[layer]:
            heads.setdefault(norm.config, []).extend(norm.heads)
        return tuple(HeadNorm(tuple(sorted(of_config)), config) for config, of_config in heads.items())


def map_heads(config: SharpConfig, entries: tuple[MappedNorm, ...], path: Path) -> HeadMap:
    """Give every head of a model its norm.

    Raises:
        InputError: an entry names a layer or head that the model does not have, or one that another entry has named.
    """
    chosen: dict[tuple[int, int], int] = {}
    for index, entry in enumerate(entries):
        layers = _checked(path, index, "layer", entry.layers, config.layers)
        heads = _checked(path, index, "head", entry.heads, config.q_heads)
        for one in ((layer, head) for layer in layers for head in heads):
            if one in chosen:
                raise InputError(
                    f"norm map {path}, entry {index}: layer {one[0]}, head {one[1]} has a norm from entry "
                    f"{chosen[one]} already; name it once"
                )
            chosen[one] = index
    configs = [_config(config, entry, f"norm map {path}, entry {index}") for index, entry in enumerate(entries)]
    norms, sources = [], []
    for layer in range(config.layers):
        by_entry: dict[int, list[int]] = {}
        for head in range(config.q_heads):
            by_entry.setdefault(chosen.get((layer, head), -1), []).append(head)
        order = sorted(by_entry)
        norms.append(
            tuple(HeadNorm(tuple(by_entry[index]), config if index < 0 else configs[index]) for index in order)
        )
        sources.append(tuple(None if index < 0 else entries[index] for index in order))
    return HeadMap(tuple(norms), tuple(sources))


def _config(config: SharpConfig, entry: MappedNorm, where: str) -> SharpConfig:
    # An alpha of 0 takes the norm's own.
    given = {"alpha": 0.0, "temperature": 1.0} | entry.options.config_fields()
    try:
        return replace(config, norm=entry.norm, gamma=None, **given)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def _checked(path: Path, index: int, name: str, given: tuple[int, ...] | None, count: int) -> tuple[int, ...]:
    if given is None:
        return tuple(range(count))
    for number in given:
        if not 0 <= number < count:
            raise InputError(
                f"norm map {path}, entry {index}: there is no {name} {number}; the model has {count}, from 0"
            )
    return tuple(dict.fromkeys(given))
