"""Builds the native targets: for libFuzzer with clang, or as programs that only replay inputs."""

import shutil
import subprocess
import sys
from pathlib import Path

from sharp.plugins import library_path

HERE = Path(__file__).parent
ROOT = HERE.parents[3]
TARGETS = ("paged_attention", "attention", "sampling")
CLANGS = ("clang++", *(f"clang++-{version}" for version in range(22, 13, -1)))
INCLUDES = (
    "plugins/cpu",
    "plugins/op",
    "plugins/onnxruntime",
    "tests/full/fuzz/native",
    "build/onnxruntime/usr/include/onnxruntime",
)


def clang() -> str | None:
    """Return a compiler with libFuzzer, or None."""
    return next((found for name in CLANGS if (found := shutil.which(name))), None)


def build_fuzzers(compiler: str, folder: Path) -> dict[str, Path]:
    """Build the fuzzers of all targets, with sanitizers, in `folder`; takes some minutes the first time."""
    tools = Path(sys.executable).parent
    folder.mkdir(parents=True, exist_ok=True)
    options = (f"-DCMAKE_CXX_COMPILER={compiler}", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}", "-DSHARP_FUZZ=ON")
    configure = [tools / "cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", *options]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    names = [f"fuzz_{target}" for target in TARGETS]
    subprocess.run([tools / "cmake", "--build", folder, "--target", *names], check=True, stdout=subprocess.DEVNULL)
    return {target: folder / f"fuzz_{target}" for target in TARGETS}


def build_replay(compiler: str, target: str, folder: Path) -> Path:
    """Build a program that runs a target with the installed kernel library over files and random bytes."""
    program = folder / f"replay_{target}"
    sources = [HERE / f"{name}.cc" for name in ("replay", "fake_runtime", target)]
    library = Path(library_path("onnxruntime"))
    command = [compiler, "-std=c++17", "-O0", *(f"-I{ROOT / include}" for include in INCLUDES), *sources, library]
    subprocess.run([*command, f"-Wl,-rpath,{library.parent}", "-o", program], check=True)
    return program
