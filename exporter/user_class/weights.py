"""The weights of a module in a trainer's file, found by the names that the module has itself.

A file may be a state dict, or have a state dict in an entry (`model`, `state_dict`, `model_state_dict`, ...). Names may
have prefixes of Lightning (`model.`), DDP (`module.`) or torch.compile (`_orig_mod.`), and the file may have averaged
weights, too. No list of entries is needed: the weights are where all names of the module follow one prefix. If there
are two such places, the user says which.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sharp.core.errors import InputError
from sharp.exporter.programs.foreign_files import owner_of
from sharp.exporter.user_class.arguments import ENTRIES, PLAIN
from sharp.models.checkpoint_files import open_safetensors, read_torch_file, shard_names

# Parts of names that wrappers of modules add: torch.compile, activation checkpointing, FSDP.
WRAPPERS = re.compile(r"(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
AVERAGED = re.compile(r"(?:^|[._])(?:ema|swa|shadow|averaged)(?:$|[._])", re.IGNORECASE)
DEEPEST = 6  # the most levels of nested dictionaries that are searched
ANCHORS = 8  # the number of names of the module by which prefixes are found
INDEX = ".safetensors.index.json"  # how the name of an index of several files ends
SHOWN = 4  # the most names that a message lists
REMEDY = "--ignore-key NAME leaves out what the model does not need"


@dataclass(frozen=True)
class Group:
    """The tensors in one dictionary of a file; `path` is the dotted path of that dictionary."""

    path: str
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class WeightsFile:
    """The content of a file of weights: groups of tensors, and dictionaries of arguments by their entry in the file."""

    path: Path
    groups: Sequence[Group]
    arguments: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class _WeightsPlace:
    """A place in a file where a module's weights may be: names in `group` that are `prefix` and a name of the module.

    `missing` has the names of the module that are not there.
    """

    group: Group
    prefix: str
    missing: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of this place for `--weights-entry`."""
        return ".".join(filter(None, (self.group.path, self.prefix.rstrip(".")))) or "."


def read_weights(path: Path) -> WeightsFile:
    """Read a `.safetensors` file, or a file of torch.save with plain data. Other objects are never unpickled.

    Weights in several files are read by their index, `model.safetensors.index.json`.

    Raises:
        InputError: the file is damaged, of another kind, or holds objects, or an index names a file that is missing,
            or files that hold a weight twice; the message says what to save instead.
    """
    if path.name.endswith(INDEX):
        return WeightsFile(path, [Group("", _unwrapped(path, _sharded(path)))], {})
    if path.suffix == ".safetensors":
        metadata, tensors = open_safetensors(path)
        stated = {name: _plain(text) for name, text in metadata.items()}
        return WeightsFile(path, [Group("", _unwrapped(path, tensors))], {"metadata": stated} if stated else {})
    try:
        content = read_torch_file(path)
    except InputError as error:
        if (known := owner_of(path)) is not None:
            raise InputError(known) from error
        raise
    groups = [Group(where, _unwrapped(path, tensors)) for where, tensors in _dictionaries(content, "", 0)]
    found = dict(_arguments(content, "", 0))
    first = [name for name in ENTRIES if name in found]
    return WeightsFile(path, groups, {name: found[name] for name in (*first, *sorted(found.keys() - {*first}))})


def _sharded(index: Path) -> dict[str, Tensor]:
    """Return all tensors by name of the files that a safetensors index lists.

    Raises:
        InputError: a file is missing, or two files have a tensor of one name.
    """
    found: dict[str, Tensor] = {}
    for shard in sorted(shard_names(index)):
        if not (index.parent / shard).is_file():
            raise InputError(f"{index} lists {shard}, which is missing; copy the checkpoint again")
        _, tensors = open_safetensors(index.parent / shard)
        if twice := found.keys() & tensors.keys():
            raise InputError(f"{index} lists files that hold {_listed(sorted(twice))} twice; save the checkpoint again")
        found |= tensors
    return found


def load_weights(
    module: nn.Module, name: str, file: WeightsFile, entry: str | None = None, ignored: Sequence[str] = ()
) -> None:
    """Load all weights of a module in place.

    Args:
        module: the module.
        name: the name of its class, for messages.
        file: the content of the file of weights.
        entry: the dotted path of the weights in the file; None finds the weights by the names in the module.
        ignored: names or patterns of weights in the file that the module has no place for and does not need.

    Raises:
        InputError: weights are missing, unexpected, of another shape or type or not finite, or the file has them more
            than once and `entry` is None.
    """
    state = module.state_dict()
    own = {WRAPPERS.sub("", key): key for key, value in state.items() if isinstance(value, Tensor)}
    expected = {key: state[name_in_module] for key, name_in_module in own.items()}
    place = _chosen(expected, name, file, entry, ignored)
    held = place.group.tensors
    # A tensor with two names in the module may be in the file under one of them.
    found = {key: held[place.prefix + key] for key in expected if place.prefix + key in held}
    for key, tensor in found.items():
        _check_tensor(file.path, name, key, tensor, expected[key])
    module.load_state_dict({own[key]: tensor for key, tensor in found.items()}, strict=False)
    state = module.state_dict()
    loaded = {key: state[name_in_module] for key, name_in_module in own.items()}
    for key, tensor in found.items():
        if not torch.equal(loaded[key], tensor.to(loaded[key].dtype)):
            raise InputError(
                f"{file.path}: {name} has one tensor for {key} and another name, and the file has two that differ; "
                "make the module as it was trained"
            )


def _chosen(
    expected: Mapping[str, Tensor], name: str, file: WeightsFile, entry: str | None, ignored: Sequence[str]
) -> _WeightsPlace:
    """Return the place of a module's weights in a file.

    Raises:
        InputError: there is no such place, or several, or the weights there do not match the module.
    """
    places = [place for group in file.groups for place in _places(group, expected)]
    if entry is not None:
        chosen = [place for place in places if place.name == (entry.rstrip(".") or ".")]
        if not chosen:
            half = [place for place in places if 2 * len(place.missing) < len(expected)]
            known = ", ".join(dict.fromkeys(place.name for place in half)) or "no entry"
            raise InputError(f"--weights-entry is {entry!r}, but {file.path} has weights of {name} in: {known}")
        place = chosen[0]
    else:
        whole = [place for place in places if not place.missing]
        if len(whole) > 1:
            names = ", ".join(place.name for place in whole)
            raise InputError(
                f"{file.path} holds weights of {name} {len(whole)} times, in {names}: say which with --weights-entry"
            )
        if not places:
            held = _listed(key for group in file.groups for key in group.tensors)
            raise InputError(f"{file.path} holds no weights of {name}, which has {_listed(expected)}; it holds {held}")
        place = whole[0] if whole else min(places, key=lambda one: len(one.missing))
        _check_averaged(file, name, place)
    if place.missing:
        raise InputError(
            f"{file.path} lacks {len(place.missing)} of the {len(expected)} weights of {name}: "
            f"{_listed(place.missing)}{_also(expected, place)}; are the arguments (--arg) those of the training?"
        )
    kept = [key for key in place.group.tensors if not any(fnmatchcase(key, pattern) for pattern in ignored)]
    inside = [key for key in kept if key.startswith(place.prefix) and key.removeprefix(place.prefix) not in expected]
    if inside:
        raise InputError(f"{file.path} has weights that {name} has no place for: {_listed(inside)}; {REMEDY}")
    outside = [key for key in kept if not key.startswith(place.prefix)]
    if outside and entry is None:
        raise InputError(
            f"{file.path} has more than the weights of {name} in {place.name}: {_listed(outside)}; "
            f"--weights-entry {place.name} takes those of {name} alone"
        )
    return place


def _places(group: Group, expected: Mapping[str, Tensor]) -> Iterator[_WeightsPlace]:
    """Yield the places in a group of tensors where the module's weights may be: a prefix before its names.

    `expected` are the module's tensors by name.
    """
    names = [*expected]
    step = max(1, len(names) // ANCHORS)
    prefixes = {
        key[: -len(anchor)]
        for anchor in names[::step]
        for key in group.tensors
        if key.endswith(anchor) and (len(key) == len(anchor) or key[-len(anchor) - 1] == ".")
    }
    for prefix in sorted(prefixes, key=len):
        # safetensors stores a tensor that has two names in a module under one name only.
        there = {value.data_ptr() for key, value in expected.items() if prefix + key in group.tensors and value.numel()}
        missing = (key for key, value in expected.items() if prefix + key not in group.tensors)
        yield _WeightsPlace(group, prefix, tuple(key for key in missing if expected[key].data_ptr() not in there))


def _check_averaged(file: WeightsFile, name: str, place: _WeightsPlace) -> None:
    """Refuse a file with averaged weights in another group, because the user did not say which weights to export."""
    for group in file.groups:
        if group is not place.group and (AVERAGED.search(group.path) or any(map(AVERAGED.search, group.tensors))):
            raise InputError(
                f"{file.path} holds averaged weights in {group.path or '.'} beside those of {name} in {place.name}: "
                f"say which with --weights-entry, --weights-entry {place.name} for the latter"
            )


def _check_tensor(path: Path, name: str, key: str, tensor: Tensor, expected: Tensor) -> None:
    """Check a tensor `key` of the file against the module's `expected`: shape, kind of type and finite values.

    `name` is the module's class. InputError if they differ.
    """
    if tensor.shape != expected.shape:
        raise InputError(
            f"{path}: {key} has shape {[*tensor.shape]}, and in {name} {[*expected.shape]}; are the arguments (--arg) "
            "those of the training?"
        )
    if tensor.is_floating_point() != expected.is_floating_point() or tensor.is_complex() != expected.is_complex():
        raise InputError(
            f"{path}: {key} is of type {str(tensor.dtype)[6:]}, and in {name} {str(expected.dtype)[6:]}; save the "
            "weights as the module has them, not quantized"
        )
    if tensor.is_floating_point() and not tensor.isfinite().all():
        raise InputError(f"{path}: the weights of {key} are not all finite; copy the checkpoint again")


def _dictionaries(content: Any, path: str, depth: int) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield every dictionary or list in a file that holds tensors, with its dotted path.

    `content` is at `path` and `depth`, the number of dictionaries and lists around it; what is deeper than `DEEPEST` is
    left out.
    """
    if depth > DEEPEST or not isinstance(content, dict | list | tuple):
        return
    entries = content.items() if isinstance(content, dict) else enumerate(content)
    items = [(str(key), value) for key, value in entries]
    tensors = {key: value for key, value in items if isinstance(value, Tensor)}
    if tensors:
        yield path, tensors
    for key, value in items:
        yield from _dictionaries(value, f"{path}.{key}" if path else key, depth + 1)


def _arguments(content: Any, path: str, depth: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every dictionary in a file that has plain values, which may be arguments, with its dotted path.

    `content` is at `path` and `depth`, the number of dictionaries around it; what is deeper than `DEEPEST` is left out.
    """
    if depth > DEEPEST or not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        return
    plain = {key: value for key, value in content.items() if isinstance(value, PLAIN) or value is None}
    lists = {key: value for key, value in content.items() if isinstance(value, list | tuple) and path}
    if (plain or lists) and not any(isinstance(value, Tensor) for value in content.values()):
        yield path or "at the top", {**plain, **lists}
    for key, value in content.items():
        yield from _arguments(value, f"{path}.{key}" if path else key, depth + 1)


def _plain(text: str) -> Any:
    """Return the value of a text in safetensors' metadata, as JSON if it is JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _unwrapped(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors under their names without the parts that wrappers such as torch.compile add.

    Raises:
        InputError: a tensor is there both with and without a wrapper's prefix.
    """
    found = {WRAPPERS.sub("", key): tensor for key, tensor in tensors.items()}
    if len(found) < len(tensors):
        raise InputError(f"{path} has weights with and without a wrapper's prefix (_orig_mod.); save one of them")
    return found


def _also(expected: Mapping[str, Tensor], place: _WeightsPlace) -> str:
    """Return words about tensors in the file that the module lacks; "" if there are none."""
    others = [key for key in place.group.tensors if key.removeprefix(place.prefix) not in expected]
    return f"; it has {_listed(others)} instead" if others else ""


def _listed(names: Iterable[str]) -> str:
    """Return the names separated by commas, at most `SHOWN` and then how many more."""
    listed = [*names]
    more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return ", ".join(listed[:SHOWN]) + more
