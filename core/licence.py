"""The licence of Sharp, a text that every installation has and that commands use as sample text."""

from importlib.metadata import files
from pathlib import Path

from sharp.core.errors import NotFoundError


def licence() -> Path:
    """Return the path of the text file with Sharp's licence.

    Raises:
        NotFoundError: the file is not installed.
    """
    for file in files("sharp-attention") or ():
        if file.name == "LICENSE":
            return Path(str(file.locate()))
    raise NotFoundError("the licence that comes with Sharp is not installed; give a text with --text")
