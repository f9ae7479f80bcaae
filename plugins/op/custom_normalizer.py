"""The definition of a user's normalizer, and the registry of installed ones."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sharp.core.errors import InputError, NotFoundError
from sharp.plugins.op.attributes import NORMALIZERS
from sharp.plugins.op.definition import CUSTOM_NAME

if TYPE_CHECKING:
    from torch import Tensor

    from sharp.plugins.op.custom_body import BodyOps

GROUP = "sharp.normalizers"


@dataclass(frozen=True)
class Streamed:
    """The form of a normalizer for kernels that see a row's keys block by block and keep a few numbers per row.

    A state is a tuple of tensors [..., 1]. It begins with the numbers `start`. `step(state, logits, visible)` takes the
    next keys [..., keys] and returns the new state, the weights of these keys so far, and a factor [..., 1] or a number
    by which the weights of all earlier keys are multiplied. Logits are 0 where a key is not visible; the weights there
    do not matter. After the last block, all weights are multiplied by `end(state)`, [..., 1] or a number.
    """

    start: tuple[float, ...]
    step: Callable[[tuple[Tensor, ...], Tensor, Tensor], tuple[tuple[Tensor, ...], Tensor, Tensor | float]]
    end: Callable[[tuple[Tensor, ...]], Tensor | float]


@dataclass(frozen=True)
class CustomNormalizer:
    """A normalizer: how rows of attention logits become weights.

    Args:
        name: the name for `--norm`: a small letter, then up to 63 small letters, digits, - and _. Sharp's own names are
            taken.
        weights: the weights in PyTorch: (logits float [..., keys], visible bool [..., keys]) -> weights [..., keys].
            Logits are 0 where a key is not visible; the weights there do not matter. The function must be
            differentiable by autograd, and exact for float64, too.
        body: the weights in standard ONNX ops: (op, logits, visible) -> the name of the weights. `op("Exp", x)` appends
            a node and returns the name of its output; op.sum, op.max and op.min reduce over the keys.
        streamed: the weights block by block; None if a weight needs the whole row.
        sparse: whether a visible key can have the weight 0; the statistic `support` then counts keys with other
            weights.

    Raises:
        InputError: the name cannot be used, or `weights` or `body` is no function.
    """

    name: str
    weights: Callable[[Tensor, Tensor], Tensor]
    body: Callable[[BodyOps, str, str], str]
    streamed: Streamed | None = None
    sparse: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not re.fullmatch(CUSTOM_NAME, self.name):
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
    """Return the entry points of installed packages that name normalizers, without names that Sharp's own have."""
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in NORMALIZERS}


_added: dict[str, CustomNormalizer] = {}


def names() -> tuple[str, ...]:
    """Return the names of all installed or added normalizers, without running their files."""
    return tuple(sorted({*_registered(), *_added}))


def is_custom(name: str) -> bool:
    """Whether a user's normalizer of this name is installed or added; Sharp's own normalizers are not."""
    return name in _added or name in _registered()


def get(name: str) -> CustomNormalizer:
    """Return the user's normalizer called `name`; its file is run the first time.

    Raises:
        NotFoundError: no normalizer of this name is installed or added.
        InputError: the file fails, or the entry point names no normalizer or one of another name.
    """
    if name not in _added:
        if name not in _registered():
            raise NotFoundError(f"no normalizer {name!r} is installed (entry points of the group {GROUP})")
        _added[name] = _load(_registered()[name])
    return _added[name]


def add(normalizer: CustomNormalizer) -> None:
    """Make a normalizer known in this process, without an entry point; it replaces one of the same name."""
    _added[normalizer.name] = normalizer


def _load(entry: EntryPoint) -> CustomNormalizer:
    """Import the normalizer that an entry point names.

    Raises:
        InputError: the import fails, the object is no `CustomNormalizer`, or its name is not the entry point's.
    """
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
    """Run a Python file and return the one normalizer that it defines; `add` makes it known by its name.

    Raises:
        NotFoundError: there is no such file.
        InputError: the file fails, or does not define exactly one normalizer.
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
    """Yield each `CustomNormalizer` among a module's values once, even if several names hold it."""
    seen: set[int] = set()
    for value in defined.values():
        if isinstance(value, CustomNormalizer) and id(value) not in seen:
            seen.add(id(value))
            yield value
