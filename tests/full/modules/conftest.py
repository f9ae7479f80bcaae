"""The libraries of `make foreign` are there for these tests only."""

from collections.abc import Iterator

import pytest

from tests.full.modules.libraries import foreign_libraries


@pytest.fixture(scope="package", autouse=True)
def _foreign_libraries() -> Iterator[None]:
    with foreign_libraries():
        yield
