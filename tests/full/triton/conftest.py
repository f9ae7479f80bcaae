"""The interpreter's process.

Triton chooses between compiler and interpreter when it is imported, by TRITON_INTERPRET. A separate process keeps that
choice from every other test, and tests that compile have the compiler.
"""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import pytest

from sharp.plugins.op.attention_reference import ContiguousOutput
from sharp.plugins.op.reference import AttentionOutput
from tests.full.triton import interpreted
from tests.full.triton.interpreted import Run


@pytest.fixture(scope="session")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    """Yield the interpreter's process, as an executor."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=interpreted.start) as executor:
        yield executor


@pytest.fixture
def run(interpreter: ProcessPoolExecutor) -> Run:
    """Return `run(case, dtype, cache_dtype, part_keys)`, which runs op PagedAttention by the interpreted kernels."""

    def run(*arguments: Any, **options: Any) -> AttentionOutput:
        result: dict[str, np.ndarray] = interpreter.submit(interpreted.run, *arguments, **options).result()
        return AttentionOutput(**result)

    return run


@pytest.fixture
def run_attention(interpreter: ProcessPoolExecutor) -> Run:
    """Return `run_attention(case, dtype, part_keys)`, which runs op SharpAttention by the interpreted kernels."""

    def run(*arguments: Any, **options: Any) -> ContiguousOutput:
        return ContiguousOutput(**interpreter.submit(interpreted.run_attention, *arguments, **options).result())

    return run
