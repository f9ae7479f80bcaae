"""Rows of a GPU's tensor are copied to the host, by a fake driver whose device memory is the host's."""

import ctypes
from contextlib import contextmanager

import numpy as np
import pytest

from sharp.core.errors import SharpError
from sharp.plugins.cuda import readback
from sharp.plugins.cuda.readback import Readback

COLUMNS = 5
TENSOR = np.arange(8 * COLUMNS, dtype=np.float32).reshape(8, COLUMNS)


class FakeDriver:
    """The driver functions that copying rows needs, on memory of the host."""

    def __init__(self, number):
        self.held, self.copied, self.refuses = {}, [], False

    @contextmanager
    def context(self):
        yield lambda function, *arguments: getattr(self, function)(*arguments)

    def cuMemHostAlloc(self, address, size, flags):
        if self.refuses:
            raise SharpError("out of memory")
        memory = ctypes.create_string_buffer(size.value)
        self.held[ctypes.addressof(memory)] = memory
        address._obj.value = ctypes.addressof(memory)

    def cuMemFreeHost(self, address):
        del self.held[address.value]

    def cuMemcpyDtoH_v2(self, to, source, size):
        ctypes.memmove(to, source.value, size.value)
        self.copied.append(size.value // (COLUMNS * 4))


@pytest.fixture
def made(monkeypatch):
    monkeypatch.setattr(readback, "Driver", FakeDriver)
    one = Readback(COLUMNS, 0)
    return one, one._driver


@pytest.mark.parametrize(
    ("indices", "copies"), [([0, 1, 2], [3]), ([4], [1]), ([1, 3, 4, 7], [1, 2, 1]), ([2, 3, 4, 5, 6, 7], [6])]
)
def test_rows_that_are_requested_are_copied_and_no_others(made, indices, copies):
    one, driver = made
    found = one.copy(TENSOR.ctypes.data, np.array(indices))
    np.testing.assert_array_equal(found, TENSOR[indices])
    assert driver.copied == copies


def test_memory_is_taken_once_and_given_back(made):
    one, driver = made
    for count in (2, 1, 2):
        one.copy(TENSOR.ctypes.data, np.arange(count))
    assert len(driver.held) == 1
    assert one.rows(2).ctypes.data in driver.held
    one.rows(3)
    one.forget()
    assert not driver.held


def test_without_page_locked_memory_other_memory_will_do(made, caplog):
    one, driver = made
    driver.refuses = True
    np.testing.assert_array_equal(one.copy(TENSOR.ctypes.data, np.arange(2)), TENSOR[:2])
    assert "not page-locked" in caplog.text
