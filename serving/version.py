"""Which Sharp this is."""

from importlib.metadata import PackageNotFoundError, version


def sharp_version() -> str:
    """The version of the installed package."""
    try:
        return version("sharp-attention")
    except PackageNotFoundError:  # run from a source tree
        return "0+unknown"
