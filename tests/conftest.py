"""Settings of the whole test run."""

import gc

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread() -> None:
    # The models of the tests are tiny: threads that wait for each other cost more than they compute.
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _rare_collections() -> None:
    # Tracing a model makes so many objects that looking at all those of torch again takes a tenth of its time.
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
