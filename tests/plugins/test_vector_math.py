"""The polynomial exp, log, tanh and power, compiled for each instruction set, agree with libm in double."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FLAGS = {
    "baseline": [],
    "avx2": ["-mavx2", "-mfma"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma"],
}
# Errors are relative to the result, except of log_near_1, whose result crosses 0 (absolute), and of the checks "edges"
# and "lanes" (0 if passed, otherwise 1).
LIMITS = {"exp": 3.5e-7, "log": 2e-7, "log_near_1": 6e-7, "tanh": 4e-7, "power": 4e-6, "edges": 0, "lanes": 0}


@pytest.mark.parametrize("isa", FLAGS)
def test_errors_of_the_vector_functions(isa: str, tmp_path: Path) -> None:
    if isa != "baseline" and not _processor_has(isa):
        pytest.skip(f"this processor has no {isa}")
    compiler = os.environ.get("CXX") or shutil.which("g++") or "c++"
    program = tmp_path / "vector_math"
    sources = [
        str(ROOT / "tests/plugins/vector_math.cc"),
        f"-I{ROOT / 'plugins/cpu'}",
        f"-I{ROOT / 'plugins/op'}",
        "-o",
        str(program),
    ]
    subprocess.run(
        [compiler, "-std=c++17", "-O2", "-ffp-contract=fast", "-fno-math-errno", *FLAGS[isa], *sources], check=True
    )
    finished = subprocess.run([str(program)], capture_output=True, text=True, check=True)
    errors = {name: float(value) for name, value in (line.split() for line in finished.stdout.splitlines())}
    assert errors.keys() == LIMITS.keys()
    for name, limit in LIMITS.items():
        assert errors[name] <= limit, (name, errors)


def _processor_has(isa: str) -> bool:
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    return {"avx2": "avx2", "avx512": "avx512vl"}[isa] in flags
