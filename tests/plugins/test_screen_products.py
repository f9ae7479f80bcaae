"""The integer products of a key screen, compiled for each instruction set, are exact.

The code for NEON runs under qemu-user.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FLAGS = {
    "baseline": [],
    "avx2": ["-mavx2", "-mfma"],
    "avx512bw": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma"],
    "avx512_vnni": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mavx512vnni"],
}
ARM_FLAGS = {"neon": [], "neon_dotprod": ["-march=armv8.2-a+dotprod"]}


def compared_and_wrong(compiler: str, flags: list[str], folder: Path, *run: str) -> tuple[int, int]:
    program = folder / "screen_products"
    sources = [
        str(ROOT / "tests/plugins/screen_products.cc"),
        f"-I{ROOT / 'plugins/cpu'}",
        f"-I{ROOT / 'plugins/op'}",
        "-o",
        str(program),
    ]
    subprocess.run([compiler, "-std=c++17", "-O2", *flags, *sources], check=True)
    finished = subprocess.run([*run, str(program)], capture_output=True, text=True, check=True)
    compared, wrong = map(int, finished.stdout.split())
    return compared, wrong


@pytest.mark.parametrize("isa", FLAGS)
def test_products_are_exact(isa: str, tmp_path: Path) -> None:
    if isa != "baseline" and isa not in Path("/proc/cpuinfo").read_text(encoding="utf-8").split():
        pytest.skip(f"this processor has no {isa}")
    compiler = os.environ.get("CXX") or shutil.which("g++") or "c++"
    compared, wrong = compared_and_wrong(compiler, FLAGS[isa], tmp_path)
    assert (compared > 1000, wrong) == (True, 0)


@pytest.mark.skipif(
    None in (shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")),
    reason="g++-aarch64-linux-gnu and qemu-user are not installed",
)
@pytest.mark.parametrize("isa", ARM_FLAGS)
def test_products_are_exact_on_arm(isa: str, tmp_path: Path) -> None:
    flags = [*ARM_FLAGS[isa], "-static"]
    compared, wrong = compared_and_wrong("aarch64-linux-gnu-g++", flags, tmp_path, "qemu-aarch64")
    assert (compared > 1000, wrong) == (True, 0)
