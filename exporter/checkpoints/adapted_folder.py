"""What the folder of a model says of its norm, before the model is read."""

from pathlib import Path

from sharp.exporter.checkpoints.nano_gpt import is_ssa_nano_gpt
from sharp.exporter.checkpoints.trained_norm import read_trained_norm, stored_norm


def recorded_norm(path: Path, trained_norm: Path | None = None) -> str | None:
    """The norm that a folder's `config.json`, or else the file `trained_norm`, names; None for every other checkpoint.

    Raises:
        InputError, NotFoundError: what it says cannot be read.
    """
    if trained_norm is not None:
        return read_trained_norm(trained_norm).norm
    if is_ssa_nano_gpt(path):
        return "ssa"
    found = stored_norm(path)
    return None if found is None else found.norm
