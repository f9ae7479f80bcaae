"""Checks of files that commands write after their work."""

import errno
import os
import shutil
from pathlib import Path

from sharp.core.errors import InputError


def check_can_write(path: Path) -> None:
    """Check before long work that its result can be written to the file `path`, which need not exist.

    Raises:
        InputError: the file or its folder is not writable, the folder does not exist, or `path` is a folder.
    """
    if not os.access(path if path.exists() else path.parent, os.W_OK) or path.is_dir():
        raise InputError(f"{path} cannot be written; choose a file in a folder that is there and that you may write")


def check_disk(needed: int, folder: Path) -> None:
    """Check before long work that the disk has room for a folder of `needed` bytes; `folder` need not exist.

    Raises:
        InputError: the disk has less room.
    """
    there = next(parent for parent in (folder.resolve(), *folder.resolve().parents) if parent.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise InputError(
            f"{folder} would take {needed / 1e6:,.0f} MB, and its disk has {free / 1e6:,.0f} MB free; make room, or "
            "choose a folder on another disk with -o"
        )


def room(error: BaseException) -> str:
    """Return the end of a message about a failed write, which says what to do about a full disk; else nothing."""
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)
    return "; make room on that disk, or choose another" if full else ""
