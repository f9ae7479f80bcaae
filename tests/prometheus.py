"""The path of Prometheus's programs: installed ones, or ones that `make setup` unpacked."""

import shutil
from pathlib import Path

import pytest

from tests.missing_tools import get

UNPACKED = Path(__file__).parents[1] / "build" / "prometheus" / "usr" / "bin"


def program(name: str) -> str:
    """Return the path of `prometheus` or `promtool`; skip the test if the program is missing."""
    found = shutil.which(name) or shutil.which(name, path=str(UNPACKED))
    if found is None:
        pytest.skip(get(name))
    return found
