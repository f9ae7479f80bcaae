"""The kernels compile for 64-bit Arm, whose NEON the vector extension maps to; needs g++-aarch64-linux-gnu."""

import shutil
import subprocess
from pathlib import Path

import pytest

CPU = Path(__file__).resolve().parents[2] / "plugins" / "cpu"
COMPILER = shutil.which("aarch64-linux-gnu-g++")


@pytest.mark.skipif(COMPILER is None, reason="g++-aarch64-linux-gnu is not installed")
@pytest.mark.parametrize("source", ["loops_baseline", "isa", "paged_attention"])
def test_compiles_for_arm(source: str) -> None:
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    subprocess.run([str(COMPILER), *flags, str(CPU / f"{source}.cc")], check=True)
