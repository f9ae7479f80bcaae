"""Run a C++ driver of TensorRT's plugins, and read its output."""

import os
import subprocess
from collections import defaultdict
from pathlib import Path

from tests.full.cuda.native import compile_program, headers


def run_driver(source: str, libraries: Path) -> dict[str, list[str]]:
    """Run the driver `source`, a C++ file of this folder; return the rest of its lines by their first word."""
    # several of xdist's workers run the driver at the same time
    program = libraries / f"{Path(source).stem}-{os.getpid()}"
    compile_program(source, program, *headers(libraries))
    finished = subprocess.run(
        [program, libraries / "libsharp_trt.so"],
        env={**os.environ, "LD_LIBRARY_PATH": str(libraries / "driver")},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = defaultdict(list)
    for line in finished.stdout.splitlines():
        word, _, rest = line.partition(" ")
        lines[word].append(rest)
    lines["stderr"] = finished.stderr.splitlines()
    return lines


def events(lines: list[str]) -> list[str]:
    """Return the calls to the CUDA driver among the lines of a plugin's call."""
    return [line.removeprefix("event ") for line in lines if line.startswith("event ")]


def values(event: str) -> dict[str, str]:
    """Return the values of a launch by the names of the kernel's parameters."""
    return dict(word.split("=") for word in event.split()[1:] if "=" in word)
