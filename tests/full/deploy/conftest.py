"""Everything that `deploy/kubernetes` can be rendered to."""

import pytest

from tests.full.deploy.rendering import OVERLAYS, render, render_combinations


@pytest.fixture(scope="session")
def combinations(tmp_path_factory):
    """Documents of every combination of components, by their names."""
    return render_combinations(tmp_path_factory.mktemp("kubernetes"))


@pytest.fixture(scope="session")
def overlays():
    """Documents of every overlay, by its name."""
    return {folder.name: render(folder) for folder in OVERLAYS}


@pytest.fixture(scope="session")
def rendered(combinations, overlays):
    """All of them."""
    return combinations | overlays
