"""The kernels compile for 64-bit Arm, whose NEON the vector extension maps to. The test needs g++-aarch64-linux-gnu."""

import subprocess
from pathlib import Path

import pytest

from tests.missing_tools import optional

CPU = Path(__file__).resolve().parents[2] / "plugins" / "cpu"
COMPILER = "aarch64-linux-gnu-g++"
SOURCES = sorted(path.stem for path in CPU.glob("*.cc") if not path.stem.startswith(("loops_avx", "loops_amx")))


@optional(COMPILER)
@pytest.mark.parametrize("source", SOURCES)
def test_compiles_for_arm(source: str) -> None:
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-DSHARP_NEON_DOTPROD"]
    if source == "loops_neon_dotprod":
        flags.append("-march=armv8.2-a+dotprod")
    subprocess.run([COMPILER, *flags, str(CPU / f"{source}.cc")], check=True)
