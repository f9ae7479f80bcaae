"""Tests again on the instruction sets that this process has not chosen: the library does so once, when it is loaded."""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

OTHERS = ("baseline", "avx2", "avx512")
LOAD = "import numpy as np; from sharp.plugins.sampling import sample; sample(np.zeros((1, 2), 'f4'), np.zeros((1, 5)))"


@functools.cache
def available() -> list[str]:
    """Those of this processor, the best first: this process has that one."""
    environment = {**os.environ, "SHARP_ISA": "none"}
    said = subprocess.run([sys.executable, "-c", LOAD], env=environment, capture_output=True, text=True, check=False)
    found = re.search(r"this processor can run: (.*)", said.stderr)
    assert found, said.stderr
    return found[1].split(", ")


def check(isa: str, *arguments: object) -> None:
    """Run pytest on another instruction set."""
    if isa not in available():
        pytest.skip(f"this processor has no {isa}")
    if isa == available()[0]:
        pytest.skip(f"{isa} is what this process has")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, arguments)]
    finished = subprocess.run(
        command,
        cwd=Path(__file__).parents[1],
        env={**os.environ, "SHARP_ISA": isa},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout[-3000:]
