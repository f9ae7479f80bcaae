"""Sharp's ops: definitions, kernels and the glue to the runtimes. `library_path` finds the compiled library."""

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from sharp.core.errors import InputError, SharpError

LIBRARIES = {"onnxruntime": "libsharp_ops.so", "cuda": "libsharp_cuda.so", "tensorrt": "libsharp_trt.so"}


def library_path(runtime: str) -> str:
    """Return the path of the native library of `runtime`, in the first folder that has the file.

    "onnxruntime" is for `SessionOptions.register_custom_ops_library`, "tensorrt" for `IPluginRegistry.load_library`;
    "cuda" has the GPU kernels. A wheel has the libraries of "cuda" and "tensorrt" only if it was built with SHARP_CUDA.
    A folder that the environment variable SHARP_LIBRARY_FOLDER names is searched first.

    Raises:
        InputError: there is no such runtime, or SHARP_LIBRARY_FOLDER is no folder.
        SharpError: the library is not built.
    """
    if runtime not in LIBRARIES:
        raise InputError(f"no library for the runtime {runtime!r}; there is one for: {', '.join(LIBRARIES)}")
    for folder in _library_folders():
        path = folder / LIBRARIES[runtime]
        if path.is_file():
            return str(path)
    how = "install Sharp with `make setup` or `pip install .`"
    if runtime != "onnxruntime":
        how = "run `make kernels` and install the wheel of `make gpu-wheel`"
    raise SharpError(f"{LIBRARIES[runtime]} is not built; {how}")


def _library_folders() -> Iterator[Path]:
    """Yield the folders that may hold the native libraries, in the order of search. They need not exist.

    Raises:
        InputError: SHARP_LIBRARY_FOLDER names no folder.
    """
    # Another build of the libraries, for example one with sanitizers (`make sanitize`).
    if chosen := os.environ.get("SHARP_LIBRARY_FOLDER"):
        if not Path(chosen).is_dir():
            raise InputError(f"SHARP_LIBRARY_FOLDER is {chosen!r}, which is no folder; correct or unset it")
        yield Path(chosen)
    # An editable install leaves the sources in place and puts what CMake installs into site-packages: both are on
    # __path__, as far as the import system knows them, and the site-packages in use hold the rest.
    for folder in __path__:
        yield Path(folder) / "lib"
    yield Path(sysconfig.get_path("platlib")) / "sharp" / "plugins" / "lib"
    # A build in the source tree without an install: cmake -S . -B build/cmake.
    yield Path(__file__).resolve().parent.parent / "build" / "cmake"
