"""The wheel, which is built once in a run of the tests."""

import platform
from pathlib import Path

import pytest
from filelock import FileLock

from tests.full.release.fresh_environment import ROOT, run


@pytest.fixture(scope="session")
def wheel(testrun_uid: str) -> Path:
    """Return the wheel that `make wheel` makes, built once in a run of all test processes."""
    built_for = ROOT / "build" / "wheel.run"
    with FileLock(ROOT / "build" / "wheel.lock"):
        if not built_for.exists() or built_for.read_text() != testrun_uid:
            run("make", "wheel")
            built_for.write_text(testrun_uid)
        (made,) = (ROOT / "dist").glob(f"*_{platform.machine()}.whl")  # a wheel for another machine may lie there, too
        return made
