"""The interpreter's process.

Triton chooses between compiler and interpreter when it is imported, by TRITON_INTERPRET. A process of its own keeps
that choice from every other test, and the tests that compile have the compiler.
"""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import pytest

from sharp.plugins.ops.attention_reference import ContiguousOutput
from sharp.plugins.ops.reference import AttentionOutput
from tests.full.triton import interpreted
from tests.full.triton.interpreted import Run


@pytest.fixture(scope="session")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    """The process, as an executor."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=interpreted.start) as executor:
        yield executor


@pytest.fixture
def run(interpreter: ProcessPoolExecutor) -> Run:
    """`run(case, dtype, cache_dtype, part_keys)`: the op by the interpreted kernels."""

    def run(*arguments: Any, **options: Any) -> AttentionOutput:
        result: dict[str, np.ndarray] = interpreter.submit(interpreted.run, *arguments, **options).result()
        return AttentionOutput(**result)

    return run


@pytest.fixture
def run_attention(interpreter: ProcessPoolExecutor) -> Run:
    """`run_attention(case, dtype, part_keys)`: op SharpAttention by the interpreted kernels."""

    def run(*arguments: Any, **options: Any) -> ContiguousOutput:
        return ContiguousOutput(**interpreter.submit(interpreted.run_attention, *arguments, **options).result())

    return run
