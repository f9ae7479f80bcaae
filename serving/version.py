"""The version of Sharp."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache  # the lookup reads files, and requests need the version
def sharp_version() -> str:
    """Return the version of the installed package."""
    try:
        return version("sharp-attention")
    except PackageNotFoundError:  # Sharp runs from a source tree
        return "0+unknown"
