"""`Staging`: the hidden folder that an export fills, and that becomes the model folder by being renamed."""

import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

# What exports without a lock left is removed when nothing in it has changed for so long: one may still run.
UNLOCKED_SECONDS = 24 * 3600.0
UNLOCKED_EMPTY_SECONDS = 60.0


class Staging:
    """A folder beside `target`, held by a lock that ends with the process, however that ends."""

    def __init__(self, target: Path) -> None:
        """Make it.

        Raises:
            OSError: it cannot be made.
        """
        self._target = target
        self.path = Path(tempfile.mkdtemp(prefix=_prefix(target), dir=target.parent))
        self._lock = os.open(self.path, os.O_RDONLY)
        with suppress(
            OSError
        ):  # some network file systems lock no folders: then nobody can tell, and nothing is removed
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def publish(self) -> None:
        """Give the folder its name."""
        self.path.chmod(0o755)  # mkdtemp's folders are private
        self.path.replace(self._target)

    def remove(self) -> None:
        """End it; what was published stays."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_stale(target: Path) -> None:
    """Remove what exports to `target` left behind whose processes were killed."""
    name = re.compile(re.escape(_prefix(target)) + "[a-z0-9_]{8}")
    unlocked = re.compile(re.escape(f".{target.name}.") + "[a-z0-9_]{8}")
    for path in target.parent.iterdir():
        if unlocked.fullmatch(path.name) and not path.is_symlink() and _abandoned(path):
            shutil.rmtree(path, ignore_errors=True)
        if name.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            with suppress(OSError):
                # An empty one may just have been made, and its lock not yet taken.
                if not any(path.iterdir()) and time.time() - path.stat().st_mtime < UNLOCKED_EMPTY_SECONDS:
                    continue
                lock = os.open(path, os.O_RDONLY)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
                finally:
                    os.close(lock)


def _abandoned(path: Path) -> bool:
    """Whether a killed export of a version without locks left this: private, a model in it, and long untouched."""
    try:
        told = path.stat()
        if stat.S_IMODE(told.st_mode) != 0o700 or told.st_uid != os.geteuid() or not (path / "model.onnx").is_file():
            return False
        latest = max(one.lstat().st_mtime for one in (path, *path.rglob("*")))
    except OSError:  # not a folder, or another export removes it
        return False
    return time.time() - latest > UNLOCKED_SECONDS


def _prefix(target: Path) -> str:
    return f".{target.name}.partial-"
