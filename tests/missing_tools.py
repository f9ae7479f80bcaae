"""Skip or fail tests that need a program that is not installed."""

import os
import shutil
from typing import NoReturn

import pytest

REQUIRED = "TESTS_REQUIRE_TOOLS"  # without the prefix SHARP_, because servers that tests start warn of unknown settings
# Programs that CI's machine lacks, each with its package in Debian.
NOT_IN_CI = {
    "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu",
    "chromium": "chromium",
    "node": "nodejs",
    "npm": "npm",
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "qemu-aarch64": "qemu-user",
}


def missing(what: str) -> NoReturn:
    """Skip the test; fail it in CI (`.ci/run`), where nobody would notice a skipped test."""
    if os.environ.get(REQUIRED) == "1":
        pytest.fail(f"{what} ({REQUIRED}=1)", pytrace=False)
    pytest.skip(what)


def get(*programs: str) -> str:
    """Return a sentence that says how to install programs of `NOT_IN_CI`."""
    packages = " ".join(NOT_IN_CI[program] for program in programs)
    return f"not there: {', '.join(programs)}; get it with: apt-get install {packages}"


def optional(*programs: str) -> pytest.MarkDecorator:
    """Skip a test where one of these programs of `NOT_IN_CI` is missing, in CI too."""
    absent = [program for program in programs if shutil.which(program) is None]
    return pytest.mark.skipif(bool(absent), reason=get(*absent))
