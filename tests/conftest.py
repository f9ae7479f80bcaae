"""Settings of the whole test run."""

import gc
import os
from pathlib import Path

import hypothesis
import pytest
import torch

# `make test` uses fast and `make test-full` full, the same examples in every run, so that a change fails for itself;
# search takes new ones. Only tests whose examples are slow (Triton's interpreter, a whole model) have a number of their
# own.
EVERYWHERE = {"deadline": None, "suppress_health_check": list(hypothesis.HealthCheck)}
hypothesis.settings.register_profile("fast", max_examples=60, derandomize=True, **EVERYWHERE)
hypothesis.settings.register_profile("full", max_examples=80, derandomize=True, **EVERYWHERE)
hypothesis.settings.register_profile("search", max_examples=300, print_blob=True, **EVERYWHERE)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))

FULL = Path(__file__).parent / "full"


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread() -> None:
    # The models of the tests are tiny: threads that wait for each other cost more than they compute.
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _rare_collections() -> None:
    # Tracing a model makes so many objects that looking at all those of torch again takes a tenth of its time.
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread the files of tests/full over the run: they wait for servers and installers while the others compute.

    The last ones come first, as compiling kernels takes longest.
    """
    full: dict[Path, None] = {}
    others: dict[Path, None] = {}
    for item in items:
        (full if FULL in item.path.parents else others)[item.path] = None
    order = {path: index / len(group) for group in ([*full][::-1], others) for index, path in enumerate(group)}
    items.sort(key=lambda item: order[item.path])
