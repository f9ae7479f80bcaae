"""Files that commands write at their end."""

import os
from pathlib import Path

from sharp.plugins.errors import InputError


def check_can_write(path: Path) -> None:
    """Find out before the work is done whether its result can be written.

    Raises:
        InputError: it cannot.
    """
    if not os.access(path if path.exists() else path.parent, os.W_OK) or path.is_dir():
        raise InputError(f"{path} cannot be written; choose a file in a folder that is there and that you may write")
