"""Size and SHA-256 of every file of a model folder: written at the end of an export, compared before it is served.

They find damage (a disk, a copy that was cut short), not malice: who can change a file can change `sharp.json` too.
"""

import hashlib
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sharp.plugins.errors import InputError, NotFoundError
from sharp.plugins.external_data import is_there, lies_inside
from sharp.plugins.manifest import MANIFEST_FILE, FileSum, Manifest, read_manifest

logger = logging.getLogger(__name__)

PIECE_BYTES = 2**20
PROGRESS_SECONDS = 5.0  # between two lines of the log
MOST_THREADS = 8
REMEDY = "copy or export the model again (--no-verify-files serves it as it is)"


def write_manifest(folder: Path, manifest: Manifest) -> Manifest:
    """Write `sharp.json` with the sums of all other files of `folder`, and return what was written."""
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    sums = _sums(folder, [name for name in names if name != MANIFEST_FILE])
    manifest = manifest.model_copy(update={"files": dict(sums)})
    manifest.write(folder)
    return manifest


def update_sums(folder: Path, paths: Iterable[Path]) -> None:
    """Bring `sharp.json` up to date after `paths`, of which some may lie in `folder`, were written.

    A folder without sums stays without.
    """
    manifest = read_manifest(folder)
    home = folder.resolve()
    inside = [path.resolve() for path in paths if path.is_file() and path.resolve().is_relative_to(home)]
    if manifest.files and inside:
        added = dict(_sums(home, [path.relative_to(home).as_posix() for path in inside]))
        manifest.model_copy(update={"files": {**manifest.files, **added}}).write(folder)


def verify_files(folder: Path, manifest: Manifest) -> None:
    """Compare the files of a model folder with their sums, several at once; the log tells the progress.

    Raises:
        InputError: a file is missing, or is not what was exported.
    """
    if not manifest.files:
        logger.info("%s: its files cannot be verified, as it was exported without checksums", folder)
        return
    for problem in _problems(folder, manifest.files):
        raise InputError(f"{problem}; {REMEDY}")


def damaged_files(folder: Path) -> list[str]:
    """A sentence for every file of a model folder that is missing or damaged.

    Raises:
        NotFoundError: there is no model folder.
        InputError: its manifest cannot be used, or has no sums.
    """
    if not (folder / MANIFEST_FILE).is_file():
        raise NotFoundError(f"{folder} is not a model folder: it has no {MANIFEST_FILE}; make one with sharp-export")
    manifest = read_manifest(folder, check_files=False)
    if not manifest.files:
        raise InputError(f"{folder} was exported without checksums; export the model again to have them")
    return list(_problems(folder, manifest.files))


def _problems(folder: Path, files: Mapping[str, FileSum]) -> Iterator[str]:
    """What is wrong with the files, the cheap findings first."""
    right_size: list[str] = []
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
    """The sum of each file, in order. Leaving the iterator early ends the reading."""
    progress = _Progress(folder, sum((folder / name).stat().st_size for name in names))
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as pool:
        try:
            # The largest first: it takes as long as all others together.
            largest = sorted(names, key=lambda name: -(folder / name).stat().st_size)
            found = {name: pool.submit(_sum, folder / name, progress) for name in largest}
            for name in names:
                yield name, found[name].result()
            progress.end()
        finally:
            progress.stopped = True
            pool.shutdown(cancel_futures=True)


def _sum(path: Path, progress: "_Progress") -> FileSum:
    digest, size = hashlib.sha256(), 0
    piece = memoryview(bytearray(PIECE_BYTES))
    with path.open("rb", buffering=0) as file:
        while not progress.stopped and (count := file.readinto(piece)):
            digest.update(piece[:count])  # other threads run meanwhile
            size += count
            progress.add(count)
    return FileSum(size=size, sha256=digest.hexdigest())


class _Progress:
    """Bytes read so far of `total`, by all threads; large models get a line in the log now and then."""

    def __init__(self, folder: Path, total: int) -> None:
        self.stopped = False
        self._folder = folder
        self._total = total
        self._done = 0
        self._lock = threading.Lock()
        self._began = self._last = time.monotonic()

    def add(self, count: int) -> None:
        """Count bytes."""
        with self._lock:
            self._done += count
            now = time.monotonic()
            if now - self._last < PROGRESS_SECONDS:
                return
            self._last = now
        logger.info("%s: %.1f of %.1f GB of its files are read", self._folder, self._done / 1e9, self._total / 1e9)

    def end(self) -> None:
        """Say how long it took."""
        seconds = time.monotonic() - self._began
        logger.info("%s: %.0f MB of files have the right SHA-256, in %.1f s", self._folder, self._total / 1e6, seconds)
