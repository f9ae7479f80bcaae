"""The check of interpreted kernels' memory accesses finds every kind of error that it is for."""

from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.full.triton import racing_kernels


def test_a_kernel_without_a_fault_passes(interpreter: ProcessPoolExecutor) -> None:
    assert interpreter.submit(racing_kernels.run, "none").result() == [1] * 21 + [0] * 19


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("beside", "beside its tensors"),
        ("both write", "two programs"),
        ("one reads what the other writes", "two programs"),
        ("no barrier before the write", "without a barrier"),
        ("no barrier before the read", "without a barrier"),
        ("two values", "two values"),
    ],
)
def test_it_finds_a_fault(interpreter: ProcessPoolExecutor, fault: str, said: str) -> None:
    with pytest.raises(Exception, match=said):
        interpreter.submit(racing_kernels.run, fault).result()
