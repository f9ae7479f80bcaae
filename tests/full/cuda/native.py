"""The GPU libraries as CMake builds them, over a package of kernels that the fake driver can read."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from sharp.plugins.cuda.compiler import HIDDEN_ARGUMENTS, PTX_CAPABILITY, Image, SpecializedKernel
from sharp.plugins.cuda.kernel_set import kernels_for, options_for, plan_constants
from sharp.plugins.cuda.package import write_package
from sharp.plugins.op.attributes import NORMALIZERS, SCALED_CACHES
from sharp.plugins.triton.options import Options

ROOT = Path(__file__).resolve().parents[3]
OPS = ("PagedAttention", "SharpAttention")
FEATURES = ("plain", "alibi", "softcap", "alibi+softcap")
PREFILL_SHARED = 100_000  # more than a kernel may have without a request
OTHER_SHARED = 4096


def compiler() -> str:
    return os.environ.get("CXX") or shutil.which("g++") or "c++"


def cmake_path(name: str) -> str:
    return str(Path(sys.executable).parent / name)


def fake_image(kernel: SpecializedKernel, capability: int | None) -> Image:
    """Return an image whose text names the kernel, its target and its parameters."""
    ptx = capability is None
    function = kernel.name.split()[0]
    image = Image(
        kernel=kernel.name,
        entry=function,
        capability=capability or PTX_CAPABILITY,
        ptx=ptx,
        exact=capability == 90,
        content=b"",
        shared_bytes=PREFILL_SHARED if function == "prefill" else OTHER_SHARED,
        threads=kernel.warps * 32,
        arguments=tuple(kernel.arguments.items()),
        hidden=HIDDEN_ARGUMENTS,
        tile=kernel.tile,
        seconds=None,
    )
    parameters = [f"{name}:{'ptr' if kind[0] == '*' else kind}" for name, kind in kernel.arguments.items()]
    words = [f"{function}@{image.target}", *parameters, *(f"{name}:ptr" for name in HIDDEN_ARGUMENTS)]
    object.__setattr__(image, "content", f"{' '.join(words)}\0{kernel.name}\0".encode())
    return image


def fake_options() -> list[Options]:
    """Return the options for which the fake package has kernels."""
    dtypes = [
        "float16",
        "float32",
        *(f"{dtype}/{cache}" for cache in SCALED_CACHES for dtype in ("float16", "float32")),
    ]
    return [option for op in OPS for option in options_for(NORMALIZERS, [64, 128], dtypes, FEATURES, op)]


def fake_package(folder: Path, capabilities: Sequence[int | None] = (80, 86, 90, 100, None)) -> None:
    options = fake_options()
    images = [
        fake_image(kernel, capability)
        for capability in capabilities
        for kernel in kernels_for(options, capability or 86)
    ]
    write_package(images, plan_constants(), folder)


def build_libraries(kernels: Path, folder: Path, *definitions: str) -> None:
    """Build libsharp_cuda.so and libsharp_trt.so in `folder`."""
    settings = ["-DSHARP_CUDA=ON", f"-DSHARP_KERNELS={kernels}", "-DCMAKE_BUILD_TYPE=Debug", *definitions]
    ninja = f"-DCMAKE_MAKE_PROGRAM={cmake_path('ninja')}"
    python = f"-DPython_EXECUTABLE={sys.executable}"
    subprocess.run(
        [cmake_path("cmake"), "-S", ROOT, "-B", folder, "-G", "Ninja", ninja, python, *settings],
        check=True,
        capture_output=True,
        text=True,
    )
    subprocess.run([cmake_path("cmake"), "--build", folder, "--target", "sharp_trt", "sharp_plugin_call"], check=True)


def headers(folder: Path) -> list[str]:
    """Return the compiler's options for the headers of CUDA, TensorRT and ONNX Runtime that CMake has found."""
    cache = (folder / "CMakeCache.txt").read_text().splitlines()
    names = ("SHARP_CUDA_INCLUDE_DIR:PATH=", "SHARP_TENSORRT_INCLUDE_DIR:PATH=", "ONNXRUNTIME_INCLUDE_DIR:PATH=")
    found = [line.removeprefix(name) for name in names for line in cache if line.startswith(name)]
    return [option for include in found for option in ("-isystem", include)]


def compile_program(source: str, output: Path, *options: str) -> None:
    """Compile a C++ file of this folder to a program or, with `options`, to a library."""
    command = [compiler(), "-std=c++17", "-O0", "-Wall", "-Wextra", ROOT / "tests" / "full" / "cuda" / source, *options]
    subprocess.run([*command, "-o", output, "-ldl"], check=True)


def build_runtime(provider: Path, folder: Path) -> None:
    """Build fakes of the libraries that ONNX Runtime's CUDA provider is linked with, in `folder`.

    Functions that fake_runtime.cc lacks return 0.
    """
    folder.mkdir()
    (folder / "nothing.cc").write_text("")
    compile_program("fake_runtime.cc", folder / "runtime.o", "-c", "-fPIC")
    nothing = [compiler(), "-shared", folder / "nothing.cc", "-Wl,-soname,libcurand.so.10"]
    subprocess.run([*nothing, "-o", folder / "libcurand.so.10"], check=True)
    table = subprocess.run(["nm", "-D", provider], capture_output=True, text=True, check=True).stdout
    undefined = [line.split()[1].split("@") for line in table.splitlines() if line.split()[0] == "U" and "@" in line]
    there = subprocess.run(["nm", folder / "runtime.o"], capture_output=True, text=True, check=True).stdout.split()
    for library in ("libcudart.so.13", "libcublas.so.13", "libcublasLt.so.13"):
        names = [name for name, version in undefined if version == library and name not in there]
        stubs = "\n".join(f'extern "C" long {name}() {{ return 0; }}' for name in names)
        (folder / "stubs.cc").write_text(stubs)
        (folder / "versions.map").write_text(f"{library} {{ global: *; }};")
        command = [compiler(), "-fPIC", "-shared", folder / "stubs.cc", f"-Wl,-soname,{library}"]
        command += [folder / "runtime.o"] if "cudart" in library else []
        command += [f"-Wl,--version-script={folder / 'versions.map'}"]
        subprocess.run([*command, "-o", folder / library], check=True)
