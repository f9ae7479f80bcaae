"""The header of every result in `bench/results/`, and the writing of results."""

import json
import os
import platform
from collections.abc import Iterable
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("sharp-attention", "onnxruntime", "numpy")


def header(benchmark: str, packages: Iterable[str] = PACKAGES) -> dict[str, Any]:
    """Return the entries benchmark (its name), date, machine, load_average, and versions (of installed `packages`)."""
    return {
        "benchmark": benchmark,
        "date": date.today().isoformat(),
        "machine": f"{processor()}, {len(os.sched_getaffinity(0))} cores",
        "load_average": os.getloadavg(),
        "versions": versions(packages),
    }


def processor() -> str:
    """Return the processor's name as Linux tells it, or its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of those `packages` that are installed, by their names."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def write(path: Path | None, result: dict[str, Any]) -> None:
    """Write `result` as JSON to `path`, whose folder is made; a path of None writes nothing."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
