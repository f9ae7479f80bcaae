"""Size and SHA-256 of every file of a model folder, written at the end of an export and compared before serving.

Checksums find damage (a broken disk, an incomplete copy) and no malice: whoever can change a file can also change
`sharp.json`.
"""

import hashlib
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sharp.core.errors import InputError
from sharp.core.external_data import is_there, lies_inside
from sharp.core.manifest import MANIFEST_FILE, FileSum, Manifest, read_manifest

logger = logging.getLogger(__name__)

PIECE_BYTES = 2**20
PROGRESS_SECONDS = 5.0  # least time between two lines of the log
MOST_THREADS = 8
REMEDY = "copy or export the model again (--no-verify-files serves it as it is)"


def write_manifest(folder: Path, manifest: Manifest) -> Manifest:
    """Write `manifest` as `folder/sharp.json`, and return the manifest that was written.

    Its field `files` is replaced by the size and the SHA-256 of every other file in `folder`, subfolders included.
    """
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    sums = _sums(folder, [name for name in names if name != MANIFEST_FILE])
    manifest = manifest.model_copy(update={"files": dict(sums)})
    manifest.write(folder)
    return manifest


def update_sums(folder: Path, paths: Iterable[Path]) -> None:
    """Update the sums in `folder/sharp.json` after `paths` were written.

    Paths outside `folder`, and paths that are no files, are ignored. A folder without sums stays without sums.

    Raises:
        NotFoundError, InputError: the manifest of the folder cannot be read.
    """
    manifest = read_manifest(folder)
    home = folder.resolve()
    inside = [path.resolve() for path in paths if path.is_file() and path.resolve().is_relative_to(home)]
    if manifest.files and inside:
        added = dict(_sums(home, [path.relative_to(home).as_posix() for path in inside]))
        manifest.model_copy(update={"files": {**manifest.files, **added}}).write(folder)


def verify_files(folder: Path, manifest: Manifest) -> None:
    """Compare the files of a model folder with the sums in `manifest`, several at once, and log the progress.

    Files without a sum are not checked. A manifest without sums is only logged.

    Raises:
        InputError: a file is missing, differs from the exported file, or is outside the folder; the message names the
            first such file.
    """
    if not manifest.files:
        logger.info("%s: its files cannot be verified, as it was exported without checksums", folder)
        return
    for problem in _problems(folder, manifest):
        raise InputError(f"{problem}; {REMEDY}")


def damaged_files(folder: Path) -> list[str]:
    """Return a sentence for every file of a model folder that is missing or damaged; an empty list if none is.

    Raises:
        NotFoundError: the folder is no model folder.
        InputError: the manifest of the folder cannot be used, or has no sums.
    """
    manifest = read_manifest(folder, check_files=False)
    if not manifest.files:
        raise InputError(f"{folder} was exported without checksums; export the model again to have them")
    return list(_problems(folder, manifest))


def _problems(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Yield a sentence (without a full stop) for every wrong file, first those found without reading content."""
    files, right_size = manifest.files, list[str]()
    for name in filter(None, (manifest.model_file, manifest.tokenizer.file)):
        if name not in files:  # no sum covers `sharp.json` itself, so anybody may have written the name there
            yield f"{folder / MANIFEST_FILE} names {name!r:.300}, which is not among the files that the export wrote"
    for name, expected in files.items():
        path = folder / name
        if not lies_inside(folder, name):
            yield f"{folder / MANIFEST_FILE} names {name!r:.300}, which is outside the model folder"
        elif not is_there(path):
            yield f"{folder} is incomplete: {name!r:.300} is missing"
        elif (size := path.stat().st_size) != expected.size:
            yield f"{path} is damaged: it has {size} bytes, and the export wrote {expected.size}"
        else:
            right_size.append(name)
    for name, found in _sums(folder, right_size):
        if found != files[name]:
            sums = f"its SHA-256 is {found.sha256}, and the export wrote {files[name].sha256}"
            yield f"{folder / name} is damaged: {sums}"


def _sums(folder: Path, names: list[str]) -> Iterator[tuple[str, FileSum]]:
    """Yield the name and the sum of each file, in the order of `names`. Closing the iterator early ends the reading."""
    progress = _Progress(folder, sum((folder / name).stat().st_size for name in names))
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as pool:
        try:
            # The largest file first, because it may take as long as all others together.
            largest = sorted(names, key=lambda name: -(folder / name).stat().st_size)
            found = {name: pool.submit(_sum, folder / name, progress) for name in largest}
            for name in names:
                yield name, found[name].result()
            progress.end()
        finally:
            progress.stopped = True
            pool.shutdown(cancel_futures=True)


def _sum(path: Path, progress: "_Progress") -> FileSum:
    """Return the size in bytes and the SHA-256 of a file.

    Add to `progress` as bytes are read, and end early once it is stopped.
    """
    digest, size = hashlib.sha256(), 0
    piece = memoryview(bytearray(PIECE_BYTES))
    with path.open("rb", buffering=0) as file:
        while not progress.stopped and (count := file.readinto(piece)):
            digest.update(piece[:count])  # releases the GIL, so other threads run meanwhile
            size += count
            progress.add(count)
    return FileSum(size=size, sha256=digest.hexdigest())


class _Progress:
    """The number of bytes that all threads have read so far of `total`, logged at most every `PROGRESS_SECONDS`."""

    def __init__(self, folder: Path, total: int) -> None:
        self.stopped = False
        self._folder = folder
        self._total = total
        self._done = 0
        self._lock = threading.Lock()
        self._began = self._last = time.monotonic()

    def add(self, count: int) -> None:
        """Add `count` read bytes, and log the progress if the last log is `PROGRESS_SECONDS` old. Thread-safe."""
        with self._lock:
            self._done += count
            now = time.monotonic()
            if now - self._last < PROGRESS_SECONDS:
                return
            self._last = now
        logger.info("%s: %.1f of %.1f GB of its files are read", self._folder, self._done / 1e9, self._total / 1e9)

    def end(self) -> None:
        """Log that all files have the right SHA-256, and how long the reading took."""
        seconds = time.monotonic() - self._began
        logger.info("%s: %.0f MB of files have the right SHA-256, in %.1f s", self._folder, self._total / 1e6, seconds)
