"""The programs of Prometheus: the system's, or those that `make setup` unpacked."""

import shutil
from pathlib import Path

import pytest

from tests.missing_tools import get

UNPACKED = Path(__file__).parents[1] / "build" / "prometheus" / "usr" / "bin"


def program(name: str) -> str:
    """The path of `prometheus` or `promtool`; without one the test is skipped."""
    found = shutil.which(name) or shutil.which(name, path=str(UNPACKED))
    if found is None:
        pytest.skip(get(name))
    return found
