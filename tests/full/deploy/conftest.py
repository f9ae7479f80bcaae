"""Everything that `deploy/kubernetes` can be rendered to."""

import pytest

from tests.full.deploy.built_images import store
from tests.full.deploy.rendering import OVERLAYS, render, render_combinations


@pytest.fixture(scope="session")
def combinations(tmp_path_factory):
    """Return the documents of every combination of components, by the components' names."""
    return render_combinations(tmp_path_factory.mktemp("kubernetes"))


@pytest.fixture(scope="session")
def overlays():
    """Return the documents of every overlay, by its name."""
    return {folder.name: render(folder) for folder in OVERLAYS}


@pytest.fixture(scope="session")
def rendered(combinations, overlays):
    """Return the documents of all combinations and overlays."""
    return combinations | overlays


@pytest.fixture(scope="session")
def image_store():
    """Skip the test without the tools for images, and clean up the store of images after all tests."""
    with store():
        yield
