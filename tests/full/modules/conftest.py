"""A fixture that makes the libraries of `make foreign` importable in these tests only."""

from collections.abc import Iterator

import pytest

from tests.exporting import one_registry, quick_tracing
from tests.full.modules.libraries import foreign_libraries

__all__ = ["one_registry", "quick_tracing"]


@pytest.fixture(scope="package", autouse=True)
def _foreign_libraries() -> Iterator[None]:
    with foreign_libraries():
        yield
