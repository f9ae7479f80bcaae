"""The description of a machine: hardware, packages and libraries that Sharp can use."""

import os
import platform
from importlib import metadata
from pathlib import Path

from sharp.core.errors import SharpError
from sharp.plugins import LIBRARIES, library_path
from sharp.plugins.cuda.device import Driver, find_device
from sharp.plugins.cuda.library import Library
from sharp.plugins.cuda.sampler import KERNEL

PACKAGES = {
    "onnxruntime": ("onnxruntime", "onnxruntime-gpu"),
    "onnx": ("onnx",),
    "numpy": ("numpy",),
    "torch": ("torch",),
    "triton": ("triton",),
    "tensorrt": ("tensorrt", "tensorrt-cu13", "tensorrt-cu12"),
    "cuda-python": ("cuda-bindings", "cuda-python"),
}


def describe() -> dict[str, str]:
    """Return a description in words of each item, by name; most missing items are "none", with the reason if known."""
    return {
        "Sharp": f"{_version('sharp-attention')}, Python {platform.python_version()}, {platform.platform()}",
        "processor": f"{_processor()}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} for this process",
        "GPU": _gpu(),
        **{name: _package(distributions) for name, distributions in PACKAGES.items()},
        "providers": _providers(),
        **{library: _library(runtime) for runtime, library in LIBRARIES.items()},
        "sampler": _sampler(),
    }


def _version(distribution: str) -> str:
    """Return the version of an installed distribution; "" if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _package(distributions: tuple[str, ...]) -> str:
    """Return names and versions of the distributions that are installed, separated by commas; "none" if no one is."""
    found = [f"{name} {version}" for name in distributions if (version := _version(name))]
    return ", ".join(found) or "none"


def _providers() -> str:
    """Return ONNX Runtime's execution providers, separated by commas, or "none" with the error of the import."""
    try:
        import onnxruntime
    except ModuleNotFoundError:
        return "none"
    except ImportError as error:
        return f"none: {error}"
    return ", ".join(onnxruntime.get_available_providers())


def _library(runtime: str) -> str:
    """Return path and size (MB) of the library for a runtime ("onnxruntime", "cuda", ...), or "none" and why."""
    try:
        path = Path(library_path(runtime))
    except SharpError as error:
        return f"none: {error}"
    return f"{path} ({path.stat().st_size / 1e6:.1f} MB)"


def _sampler() -> str:
    """Return where servers on the first GPU sample: on the GPU if the library has the kernel and it loads."""
    try:
        library, device = Library(Path(library_path("cuda"))), find_device()
        capability = "{}.{}".format(*divmod(device.compute_capability, 10))
        if not library.has_kernel(KERNEL, device.compute_capability):
            return f"the host's: no kernel {KERNEL} for compute capability {capability}"
        with Driver().context():
            library.prepare_sampling()
    except SharpError as error:
        return f"the host's: {error}"
    return f"the GPU's: {KERNEL} for compute capability {capability} loads"


def _gpu() -> str:
    """Return a GPU's name, compute capability, memory and CUDA version in words; "none" and why."""
    try:
        device = find_device()
    except SharpError as error:
        return f"none: {error}"
    major, minor = divmod(device.compute_capability, 10)
    memory = f"{device.memory / 2**30:.0f} GiB"
    return f"{device.name}, compute capability {major}.{minor}, {memory}, a driver for CUDA {device.cuda}"


def _processor() -> str:
    """Return the processor's model name from /proc/cpuinfo, or the machine's architecture."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
