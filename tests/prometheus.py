"""The programs of Prometheus: the system's, or those that `make setup` unpacked."""

import shutil
from pathlib import Path

import pytest

UNPACKED = Path(__file__).parents[1] / "build" / "prometheus" / "usr" / "bin"


def program(name: str) -> str:
    """The path of `prometheus` or `promtool`; without one the test is skipped."""
    found = shutil.which(name) or shutil.which(name, path=str(UNPACKED))
    if found is None:
        pytest.skip(f"{name} is not there; get it with: apt-get install prometheus")
    return found
