"""The kernels of one model in a folder: compiled by `sharp build` or at the first start, and read by the library."""

import logging
import os
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from sharp.plugins import library_path
from sharp.plugins.cuda.device import find_device
from sharp.plugins.cuda.library import Library
from sharp.plugins.errors import InputError, SharpError

logger = logging.getLogger(__name__)

FOLDER = "kernels"  # in a model folder
NEEDED = ("triton", "onnx")  # what compiling takes, and a server need not have


def compile_kernels(model: Path, folder: Path, capability: int, jobs: int | None = None) -> tuple[int, int]:
    """Compile the kernels that a model folder needs, in parallel and with progress; their number, and size in bytes.

    Raises:
        InputError: it is no model folder, or needs no kernels.
        SharpError: Triton refused one.
    """
    from sharp.plugins.build_kernels import compile_with_progress
    from sharp.plugins.cuda.kernel_set import kernels_for, plan_constants
    from sharp.plugins.cuda.model_kernels import options_of_model
    from sharp.plugins.cuda.package import write_package

    work = [(kernel, capability) for kernel in kernels_for(options_of_model(model), capability)]
    images = compile_with_progress(work, cache_folder() / "triton", jobs or len(os.sched_getaffinity(0)))
    return len(images), write_package(images, plan_constants(), folder)


def add_kernels(model: Path, capability: int) -> None:
    """Give the library the kernels of a model that it lacks: those in the model folder, else newly compiled ones.

    Without Triton, or a folder of kernels, nothing happens: the library itself names the first kernel that is missing.

    Raises:
        SharpError: the folder of kernels is damaged or of another version, or Triton refused a kernel.
    """
    library = Library(Path(library_path("cuda")))
    if (model / FOLDER).is_dir():
        library.add_kernels(model / FOLDER)
    if not all(map(find_spec, NEEDED)):
        return
    from sharp.plugins.cuda.compiler import CAPABILITIES
    from sharp.plugins.cuda.kernel_set import kernels_for
    from sharp.plugins.cuda.model_kernels import options_of_model

    if capability not in CAPABILITIES:
        return
    needed = [kernel.name for kernel in kernels_for(options_of_model(model), capability)]
    missing = [name for name in needed if not library.has_kernel(name, capability)]
    if not missing:
        return
    counts = len(missing), len(needed)
    logger.warning("%d of the model's %d kernels are not built in; Triton compiles what its cache lacks", *counts)
    with TemporaryDirectory(prefix="sharp-kernels-") as folder:  # the library reads it at once
        compile_kernels(model, Path(folder), capability)
        library.add_kernels(Path(folder))


def add_kernels_for_gpu(model: Path, gpu: int = 0) -> None:
    """`add_kernels` for the GPU of this number.

    Raises:
        InputError: they are missing, and cannot be made here.
    """
    try:
        add_kernels(model, find_device(gpu).compute_capability)
    except SharpError as error:
        raise InputError(f"{model} has no kernels for this GPU: {error}") from error


def cache_folder() -> Path:
    """Where Triton keeps what it has compiled, by a hash of source, options and its version."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sharp" / "kernels"
