"""Settings of the whole test run."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread() -> None:
    # The models of the tests are tiny: threads that wait for each other cost more than they compute.
    torch.set_num_threads(1)
