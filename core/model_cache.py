"""Models that `sharp serve` and `sharp run` have exported on first use: where they are, and what they were made of."""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sharp.core.errors import InputError, NotFoundError

CACHE_VARIABLE = "SHARP_CACHE"
SOURCE = "source.json"  # in an entry: what its model was exported from


@dataclass(frozen=True)
class CachedModel:
    """One entry of the cache.

    Attributes:
        name: the name of the entry, for `sharp cache remove`.
        source: the absolute path of the checkpoint.
        options: the options of `sharp-export` that it was exported with.
        bytes: the size on disk.
        used: when it was last served, in seconds since 1970.
    """

    name: str
    source: str
    options: str
    bytes: int
    used: float


def cache_folder() -> Path:
    """Return the folder of the cache: $SHARP_CACHE, $XDG_CACHE_HOME/sharp, or ~/.cache/sharp."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sharp"


def entry_of(source: Path, options: Sequence[str]) -> Path:
    """Return the folder of the entry for a checkpoint and options of `sharp-export`; it need not exist.

    The entry is another one when a file of the checkpoint has another size or time of change, when an option differs,
    or with another version of Sharp.
    """
    found = source.resolve()
    files = sorted(path for path in found.rglob("*") if path.is_file()) if found.is_dir() else [found]
    identity = {
        "source": str(found),
        "files": [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files],
        "options": list(options),
        "sharp": version("sharp-attention"),
    }
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    return cache_folder() / "models" / f"{_name_of(source)}-{digest[:12]}"


def folder_of(entry: Path, source: Path) -> Path:
    """Return the model folder of an entry. Its name, which the server gives the model, is that of the checkpoint."""
    return entry / _name_of(source)


@contextmanager
def locked(entry: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of an entry, so that two commands do not export the same model at the same time.

    `on_wait` is called before waiting for another command that holds it.

    Raises:
        InputError: the cache cannot be written.
    """
    try:
        entry.mkdir(parents=True, exist_ok=True)
        lock = (entry / "lock").open("w")
    except OSError as error:
        raise InputError(
            f"the cache {cache_folder()} cannot be written: {error.strerror}; set {CACHE_VARIABLE} to another folder, "
            "or export the model yourself with sharp-export"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def describe_entry(entry: Path, source: Path, options: Sequence[str]) -> None:
    """Write a JSON file into the folder `entry` that names the checkpoint `source` and the export's `options`.

    `cached_models` reads this file. The folder must exist.
    """
    content = {"source": str(source.absolute()), "options": list(options)}
    (entry / SOURCE).write_text(json.dumps(content), encoding="utf-8")


def cached_models() -> list[CachedModel]:
    """Return the models in the cache, the one that was used last first."""
    found = []
    for entry in sorted((cache_folder() / "models").glob("*")):
        described = _described(entry)
        sizes = [path.stat().st_size for path in entry.rglob("*") if path.is_file()]
        source = str(described.get("source", "?"))
        used = (entry / "lock").stat().st_mtime if (entry / "lock").exists() else entry.stat().st_mtime
        options = " ".join(map(str, described.get("options", ())))
        found.append(CachedModel(entry.name, source, options, sum(sizes), used))
    return sorted(found, key=lambda model: -model.used)


def remove_models(names: Sequence[str]) -> None:
    """Remove entries of the cache.

    Raises:
        NotFoundError: the cache has no entry of one of the names; then none is removed.
    """
    known = {model.name for model in cached_models()}
    if unknown := [name for name in names if name not in known]:
        raise NotFoundError(f"the cache has no model {unknown[0]}; sharp cache lists what it has")
    for name in names:
        shutil.rmtree(cache_folder() / "models" / name)


def _name_of(source: Path) -> str:
    """Return a source's file or folder name for an entry of the cache: at most 60 letters, digits, ".", "_" and "-".

    A file loses its suffix; each other character becomes "-".
    """
    source = source.absolute()
    name = source.name if source.is_dir() else source.stem
    return "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in name)[:60]


def _described(entry: Path) -> dict[str, Any]:
    """Return the JSON object that describes a cache entry's source; empty if it is missing or no object."""
    try:
        content = json.loads((entry / SOURCE).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # an export that was interrupted
        return {}
    return content if isinstance(content, dict) else {}
