"""The mark `full`, for a case of a test that runs in `make test-full` only."""

from typing import Any

import pytest


def full(*values: object) -> Any:
    """Return the arguments of a case that `make test` leaves out."""
    return pytest.param(*values, marks=pytest.mark.full)
