"""The hidden folder that an export writes to, and that is renamed to the model folder when it is complete."""

import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sharp.core.errors import InputError

# Folders without a lock are removed if nothing in them has changed for this time. Their export may still run before.
UNLOCKED_SECONDS = 24 * 3600.0
UNLOCKED_EMPTY_SECONDS = 60.0


class Staging:
    """A folder beside `target`, with a lock that the system releases when the process ends in any way.

    Write into `path`, call `publish` when all is written, and call `remove` once in any case.
    """

    def __init__(self, target: Path) -> None:
        """Make the folder and lock it.

        Raises:
            OSError: the folder cannot be made.
            InputError: another command is writing `target`.
        """
        self._target = target
        self.path = Path(tempfile.mkdtemp(prefix=_prefix(target), dir=target.parent))
        self._lock = os.open(self.path, os.O_RDONLY)
        # Some network file systems cannot lock folders. There, `remove_stale` cannot lock them either and keeps them.
        with suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # After the own lock, so that of two commands at least one sees the other.
        if any(path != self.path and is_locked(path) for path in _partial_folders(target)):
            self.remove()
            raise InputError(
                f"another command is writing {target} now; wait until it ends, or choose another folder with -o"
            )

    def publish(self) -> None:
        """Rename the folder to `target`, which must not exist or be an empty folder, with ordinary permissions.

        Raises:
            OSError: the folder cannot be renamed.
        """
        mask = os.umask(0o077)  # there is no other way to read it
        os.umask(mask)
        for path in (self.path, *self.path.rglob("*")):  # mkdtemp, safetensors and onnx let only the user read
            path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)
        self.path.replace(self._target)

    def remove(self) -> None:
        """Remove the folder, unless it was published, and release the lock. Call it once."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_stale(target: Path) -> None:
    """Remove the folders that killed exports to `target` have left behind. Locked folders, of running exports, stay.

    Raises:
        OSError: the parent of `target` cannot be listed.
    """
    unlocked = re.compile(re.escape(f".{target.name}.") + "[a-z0-9_]{8}")
    for path in target.parent.iterdir():
        if unlocked.fullmatch(path.name) and not path.is_symlink() and _abandoned(path):
            shutil.rmtree(path, ignore_errors=True)
    for path in _partial_folders(target):
        with suppress(OSError):
            # An empty folder may have been made a moment ago and not be locked yet.
            if not any(path.iterdir()) and time.time() - path.stat().st_mtime < UNLOCKED_EMPTY_SECONDS:
                continue
            lock = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def check_output(folder: Path) -> None:
    """Check that an export can be put into `folder`, which need not exist.

    Raises:
        InputError: `folder` is a file, is not empty, or is a mount point.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"the output folder {folder} is not empty; choose another with -o, or remove it first")
    if folder.resolve().is_mount():  # for example a volume of a container
        raise InputError(
            f"the output folder {folder} is a mount point, which a finished export cannot take the place of; choose a "
            f"folder in it: -o {folder / 'model'}"
        )


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Make a folder and hold its lock, so that two commands do not work in it; remove it again if it stays empty.

    Raises:
        InputError: another command holds it, or it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise InputError(f"the folder {folder} cannot be made: {error.strerror}; choose another with -o") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(
                f"another command is working in {folder} now; wait until it ends, or choose another folder with -o"
            ) from error
        except OSError:  # a network file system without locks
            pass
        yield
    finally:
        os.close(lock)
        with suppress(OSError):  # it is not empty
            folder.rmdir()


def is_locked(folder: Path) -> bool:
    """Whether a process that runs holds the lock of a folder."""
    try:
        lock = os.open(folder, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a network file system without locks
        return False
    finally:
        os.close(lock)
    return False


def _partial_folders(target: Path) -> Iterator[Path]:
    """Yield the folders beside `target` that interrupted exports left."""
    name = re.compile(re.escape(_prefix(target)) + "[a-z0-9_]{8}")
    for path in sorted(target.parent.iterdir()):
        if name.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            yield path


def _abandoned(path: Path) -> bool:
    """Whether a killed export of a version without locks left this folder: private, with a model, long unchanged."""
    try:
        told = path.stat()
        if stat.S_IMODE(told.st_mode) != 0o700 or told.st_uid != os.geteuid() or not (path / "model.onnx").is_file():
            return False
        latest = max(entry.lstat().st_mtime for entry in (path, *path.rglob("*")))
    except OSError:  # not a folder, or another export removes it
        return False
    return time.time() - latest > UNLOCKED_SECONDS


def _prefix(target: Path) -> str:
    """Return the beginning of the names of temporary folders for `target`."""
    return f".{target.name}.partial-"
