"""The GPU libraries, built once, and processes that call them with a fake CUDA driver."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from filelock import FileLock

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

from sharp.plugins import library_path
from tests.exporting import one_registry, one_trace, quick_tracing
from tests.full.cuda.native import ROOT, build_libraries, build_runtime, compile_program, fake_package, headers
from tests.full.cuda.process import Call

__all__ = ["one_registry", "one_trace", "quick_tracing"]


@pytest.fixture(scope="session")
def libraries(tmp_path_factory, worker_id) -> Path:
    """Build libsharp_cuda.so and libsharp_trt.so over fake kernels, and return their folder.

    The folder also has libsharp_ops.so, as in a wheel, host_provider.so, which runs its CUDA op on the CPU, and the
    fake driver in `driver`.
    """
    own = tmp_path_factory.getbasetemp()
    folder = (own if worker_id == "master" else own.parent) / "gpu"  # all of xdist's workers share the folder
    with FileLock(f"{folder}.lock"):
        if not (folder / "build" / "driver" / "libcuda.so.1").exists():
            build_all(folder)
    return folder / "build"


def build_all(folder: Path) -> None:
    fake_package(folder / "kernels")
    build_libraries(folder / "kernels", folder / "build")
    driver = folder / "build" / "driver" / "libcuda.so.1"
    driver.parent.mkdir()
    shared = ("-fPIC", "-shared", *headers(folder / "build"))
    ops = Path(shutil.copy(library_path("onnxruntime"), folder / "build"))
    # The library is never unloaded, because libsharp_ops.so keeps the table of functions that it was given.
    own = ("-Wl,-z,nodelete", f'-DLIBRARY="{ops}"')
    compile_program("host_provider.cc", folder / "build" / "host_provider.so", *shared, *own)
    compile_program("fake_driver.cc", driver, *shared, "-Wl,-soname,libcuda.so.1")


@pytest.fixture(scope="session")
def cuda_provider(libraries) -> dict[str, str]:
    """Return variables for a process in which ONNX Runtime's CUDA provider finds a GPU that computes nothing."""
    package = ROOT / "build" / "onnxruntime-gpu"
    provider = package / "onnxruntime" / "capi" / "libonnxruntime_providers_cuda.so"
    if not provider.is_file():
        pytest.skip(f"no onnxruntime-gpu: pip install --no-deps --target {package.relative_to(ROOT)} onnxruntime-gpu")
    with FileLock(f"{libraries}.lock"):
        if not (libraries / "runtime" / "libcublasLt.so.13").exists():
            build_runtime(provider, libraries / "runtime")
    return {
        "LD_LIBRARY_PATH": f"{libraries / 'driver'}:{libraries / 'runtime'}",
        "PYTHONPATH": str(package),
    }


@pytest.fixture(scope="session")
def launch(libraries) -> Callable[..., list[dict]]:
    """Return a function that makes calls in one process, on a device of a capability, and returns their results."""

    def run(calls: Sequence[Call], capability: int = 90, driver: bool = True) -> list[dict]:
        environment = {**os.environ, "SHARP_FAKE_CAPABILITY": str(capability)}
        if driver:
            environment["LD_LIBRARY_PATH"] = str(libraries / "driver")
        finished = subprocess.run(
            [sys.executable, "-m", "tests.full.cuda.process", libraries / "libsharp_cuda.so"],
            input=json.dumps([call.as_dict() for call in calls]),
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        return json.loads(finished.stdout)

    return run
