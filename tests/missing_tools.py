"""What a test does where a program that it needs is missing."""

import os
from typing import NoReturn

import pytest

REQUIRED = "TESTS_REQUIRE_TOOLS"  # no SHARP_ name: servers that tests start would warn of it


def missing(what: str) -> NoReturn:
    """Skip the test; in CI (`.ci/run`) it fails, as nobody reads there what was skipped."""
    if os.environ.get(REQUIRED) == "1":
        pytest.fail(f"{what} ({REQUIRED}=1)", pytrace=False)
    pytest.skip(what)
