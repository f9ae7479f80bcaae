"""The kernels' tests run again on other instruction sets, each in a new process.

A process chooses its instruction set once, when it loads the library.
"""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = [
    *(HERE / "conformance" / f"test_kernel{suffix}.py" for suffix in ("", "_edges", "_reach", "_types")),
    HERE / "conformance" / "test_fp8_caches.py",
    HERE / "conformance" / "test_key_screen.py",
    HERE / "test_sampling.py",
]
# Of test_kernel_types, run only one shape for each of the kernel's loops. The other cases test no further arithmetic.
SELECTED = "not test_kernel_types or ((16_bits or int8) and (prompt or split))"
LOAD = """
import numpy as np
from sharp.plugins.cpu.sampling import sample
sample(np.zeros((1, 2), "f4"), np.zeros((1, 5)))
"""


def load_with(isa: str) -> str:
    """Return the stderr of a process that loads the library with the instruction set `isa`."""
    environment = {**os.environ, "SHARP_ISA": isa}
    command = [sys.executable, "-c", LOAD]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stderr


@functools.cache
def available() -> list[str]:
    """Return the instruction sets of this processor, the best first. This process uses the first."""
    said = load_with("none")
    found = re.search(r"this processor can run: (.*)", said)
    assert found, said
    return found[1].split(", ")


@pytest.mark.full
@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512", "avx512_vnni"])
def test_others_agree_too(isa: str) -> None:
    if isa not in available():
        pytest.skip(f"this processor has no {isa}")
    if isa == available()[0]:
        pytest.skip(f"{isa} is what this process has")
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", SELECTED, *map(str, FILES)],
        cwd=HERE.parent,
        env={**os.environ, "SHARP_ISA": isa, "HYPOTHESIS_PROFILE": "fast", "TESTS_SHARE": "3"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout[-3000:]


def test_an_unknown_one_is_an_error() -> None:
    assert "SharpError: SHARP_ISA is 'mmx'; this processor can run" in load_with("mmx")
