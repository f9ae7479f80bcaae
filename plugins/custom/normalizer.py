"""What a user's normalizer consists of, and the registry of those that are installed."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sharp.plugins.errors import InputError, NotFoundError
from sharp.plugins.ops.attributes import NORMALIZERS

if TYPE_CHECKING:
    from torch import Tensor

    from sharp.plugins.custom.body import BodyOps

GROUP = "sharp.normalizers"
NAME = r"[a-z][a-z0-9_-]{0,63}"


@dataclass(frozen=True)
class Streamed:
    """A normalizer's form for kernels that see a row's keys block by block, and keep a few numbers per row.

    A state is a tuple of tensors [..., 1]. `step(state, logits, visible)` takes the next keys [..., keys] and returns
    the state after them, their weights so far, and what the weights of all keys before are multiplied by [..., 1].
    After the last block, all weights are multiplied by `end(state)` [..., 1].
    """

    start: tuple[float, ...]
    step: Callable[[tuple[Tensor, ...], Tensor, Tensor], tuple[tuple[Tensor, ...], Tensor, Tensor | float]]
    end: Callable[[tuple[Tensor, ...]], Tensor | float]


@dataclass(frozen=True)
class CustomNormalizer:
    """A normalizer: how rows of attention logits become weights.

    Args:
        name: of `--norm`; small letters, digits, - and _.
        weights: (logits float [..., keys], visible bool of its shape) -> weights of its shape, in PyTorch. Logits are 0
            where a key is not visible; the weights there do not matter. Differentiable by autograd, and exact for
            float64 too.
        body: the same in standard ONNX ops: (op, logits, visible) -> the name of the weights.
        streamed: its form block by block; None where a weight needs the whole row.
        sparse: a visible key can have the weight 0; the statistic `support` counts those that have more.
    """

    name: str
    weights: Callable[[Tensor, Tensor], Tensor]
    body: Callable[[BodyOps, str, str], str]
    streamed: Streamed | None = None
    sparse: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not re.fullmatch(NAME, self.name):
            raise InputError(
                f"the normalizer's name is {self.name!r}; use up to 64 small letters, digits, - and _, a letter first"
            )
        if self.name in NORMALIZERS:
            raise InputError(f"the normalizer's name is {self.name!r}, which Sharp has itself; choose another")
        for field in ("weights", "body"):
            if not callable(getattr(self, field)):
                raise InputError(f"{field} of the normalizer {self.name} is no function")


@cache
def _registered() -> dict[str, EntryPoint]:
    return {one.name: one for one in entry_points(group=GROUP) if one.name not in NORMALIZERS}


_added: dict[str, CustomNormalizer] = {}


def names() -> tuple[str, ...]:
    """Those that are installed or added; none of their files is run for it."""
    return tuple(sorted({*_registered(), *_added}))


def is_custom(name: str) -> bool:
    """Whether a normalizer of this name is installed or added."""
    return name in _added or name in _registered()


def get(name: str) -> CustomNormalizer:
    """The normalizer called `name`; its file is run the first time.

    Raises:
        NotFoundError: none is installed under this name.
        InputError: what is installed is no normalizer, or its file fails.
    """
    if name not in _added:
        if name not in _registered():
            raise NotFoundError(f"no normalizer {name!r} is installed (entry points of the group {GROUP})")
        _added[name] = _load(_registered()[name])
    return _added[name]


def add(normalizer: CustomNormalizer) -> None:
    """Make a normalizer known in this process, without an entry point."""
    _added[normalizer.name] = normalizer


def _load(entry: EntryPoint) -> CustomNormalizer:
    try:
        found = entry.load()
    except Exception as error:
        raise InputError(f"the normalizer {entry.name} ({entry.value}) cannot be loaded: {error!r}") from error
    if not isinstance(found, CustomNormalizer):
        raise InputError(f"{entry.value} is no sharp.CustomNormalizer; let the entry point {entry.name} name one")
    if found.name != entry.name:
        raise InputError(f"{entry.value} is called {found.name}, its entry point {entry.name}; give both one name")
    return found


def in_file(path: Path) -> CustomNormalizer:
    """The one normalizer that a Python file defines; the file is run.

    Raises:
        NotFoundError: there is no such file.
        InputError: it fails, or does not define exactly one.
    """
    if not path.is_file():
        raise NotFoundError(f"there is no file {path}")
    try:
        defined = runpy.run_path(str(path))
    except Exception as error:
        raise InputError(f"{path} fails: {error!r}") from error
    found = list(_distinct(defined))
    if len(found) != 1:
        raise InputError(
            f"{path} defines {len(found)} normalizers; let it define one, normalizer = sharp.CustomNormalizer(...)"
        )
    return found[0]


def _distinct(defined: dict[str, Any]) -> Iterator[CustomNormalizer]:
    seen: set[int] = set()
    for value in defined.values():
        if isinstance(value, CustomNormalizer) and id(value) not in seen:
            seen.add(id(value))
            yield value
