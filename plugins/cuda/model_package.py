"""The folder with the kernels of one model: written by `sharp build` or at the first start, and read by the library."""

import logging
import os
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from sharp.core.errors import InputError, SharpError
from sharp.plugins import library_path
from sharp.plugins.cuda.device import find_device
from sharp.plugins.cuda.library import Library

logger = logging.getLogger(__name__)

FOLDER = "kernels"  # the name of the folder inside a model folder
NEEDED = ("triton", "onnx")  # packages that compiling needs, and that a server may lack


def compile_kernels(model: Path, folder: Path, capability: int) -> tuple[int, int]:
    """Compile the kernels that a model folder needs, in parallel; return their number, and their size in bytes.

    The package is written into `folder`, which is made if it does not exist. Compiled kernels are also kept in
    `cache_folder`.

    Args:
        model: the model folder.
        folder: the folder of the package.
        capability: the GPU's compute capability (90 is 9.0), one of `CAPABILITIES`.

    Raises:
        NotFoundError: `model` is not a model folder.
        InputError: the model folder is not valid or needs no kernels, or a kernel needs too much shared memory.
        SharpError: Triton refused a kernel.
    """
    from sharp.plugins.cuda.build_kernels import compile_with_progress
    from sharp.plugins.cuda.kernel_set import kernels_for, plan_constants
    from sharp.plugins.cuda.model_kernels import options_of_model
    from sharp.plugins.cuda.package import write_package

    work = [(kernel, capability) for kernel in kernels_for(options_of_model(model), capability)]
    images = compile_with_progress(work, cache_folder() / "triton", len(os.sched_getaffinity(0)))
    return len(images), write_package(images, plan_constants(), folder)


def add_kernels(model: Path, capability: int) -> None:
    """Add to the library the kernels of a model that it lacks: from the model folder, or else newly compiled.

    Without Triton or the package onnx nothing is compiled, and it is not known which kernels are missing; a call of the
    library then names the first one.

    Raises:
        InputError: kernels are missing, and Sharp compiles none for `capability`.
        SharpError: the library is not built, the folder of kernels is damaged or of another version, the model folder
            cannot be used, or Triton refused a kernel.
    """
    library = Library(Path(library_path("cuda")))
    if (model / FOLDER).is_dir():
        library.add_kernels(model / FOLDER)
    if absent := [package for package in NEEDED if find_spec(package) is None]:
        logger.info("kernels that are not built in would not be compiled, because this needs %s", " and ".join(absent))
        return
    from sharp.plugins.cuda.compiler import CAPABILITIES
    from sharp.plugins.cuda.kernel_set import kernels_for
    from sharp.plugins.cuda.model_kernels import options_of_model

    needed = [kernel.name for kernel in kernels_for(options_of_model(model), capability)]
    missing = [name for name in needed if not library.has_kernel(name, capability)]
    if not missing:
        return
    if capability not in CAPABILITIES:
        known = ", ".join(f"{known / 10:.1f}" for known in CAPABILITIES)
        raise InputError(
            f"the library has no kernel {missing[0]} for compute capability {capability / 10:.1f}, and Sharp compiles "
            f"for {known} only; build the library with PTX (make kernels KERNELS='--target ptx --model {model}')"
        )
    counts = len(missing), len(needed)
    logger.warning("%d of the model's %d kernels are not built in; Triton compiles what its cache lacks", *counts)
    # The library reads the folder at once, so it may be temporary.
    with TemporaryDirectory(prefix="sharp-kernels-") as folder:
        compile_kernels(model, Path(folder), capability)
        library.add_kernels(Path(folder))


def add_kernels_for_gpu(model: Path, gpu: int = 0) -> None:
    """Add to the library the kernels of a model that it lacks for the GPU with this number; see `add_kernels`.

    Raises:
        InputError: there is no such GPU, the library is not built, or kernels are missing and cannot be compiled here.
    """
    try:
        add_kernels(model, find_device(gpu).compute_capability)
    except SharpError as error:
        raise InputError(f"{model} has no kernels for this GPU: {error}") from error


def cache_folder() -> Path:
    """Return the folder in which compiled kernels are kept, by a hash of source, options and Triton's version.

    The folder need not exist. It is sharp/kernels in XDG_CACHE_HOME, or in ~/.cache.
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sharp" / "kernels"
